"""The address `/` of the API: it leads people to a page that they can read."""

from functools import partial

from kvmesh.mesh.http.request import Reply, Request
from kvmesh.mesh.http.server import Route

HOME = "/"


def home(path: str) -> Route:
    """Return the route of `/`, which leads to the page at `path`."""
    return Route("GET", HOME, partial(lead_to, path), is_open=True)


async def lead_to(path: str, request: Request) -> Reply:
    return Reply(status=307, headers={"location": path, "cache-control": "no-store"})
