"""The endpoints of kvmesh itself: tokens, placements, health and the description of the API."""
