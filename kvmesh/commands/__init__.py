"""The commands of `kvmesh`, one module each."""
