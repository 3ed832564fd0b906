"""The laboratory: measure the parts of kvmesh, and break a whole mesh. It is not in the wheel."""
