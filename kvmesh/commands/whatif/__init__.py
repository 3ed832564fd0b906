"""`kvmesh whatif`: what recent requests would have seen from another fleet, cache or routing policy."""
