"""Who is in the mesh: keys under leases, and news of their coming and going."""

from mesh.discovery.board import Change, Deleted, Put
from mesh.discovery.store import Discovery, Registration, open_discovery

__all__ = ["Change", "Deleted", "Discovery", "Put", "Registration", "open_discovery"]
