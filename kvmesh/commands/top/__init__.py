"""`kvmesh top`: a running mesh in this terminal."""
