"""The `kvmesh` command: composes the services into a mesh that runs here."""
