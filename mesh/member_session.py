"""Ask services of the mesh over HTTP, as a member of it."""

from typing import Any

import aiohttp

from kvmesh.mesh.identity.credentials import Credentials


def member_session(credentials: Credentials | None, **settings: Any) -> aiohttp.ClientSession:
    """Return an HTTP client that shows this process's certificate, and talks to members of the mesh over https.

    Without credentials it is a plain client. Servers outside of the mesh need another client.
    """
    if credentials is None:
        return aiohttp.ClientSession(**settings)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=credentials.dialing()), **settings)
