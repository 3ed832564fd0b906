"""The live page: what an operator sees of the mesh while it runs, at /ui and with `kvmesh top`."""
