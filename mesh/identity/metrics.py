"""Count handshakes, and report when certificates expire."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvmesh.mesh.identity.credentials import Credentials, open_credentials
from kvmesh.mesh.identity.names import Identity, MeshRole
from kvmesh.mesh.measure import locked_counter, locked_gauge
from kvmesh.protocol.errors import ConfigError

HANDSHAKES = locked_counter("kvmesh_tls_handshakes_total")
EXPIRY = locked_gauge("kvmesh_tls_certificate_expiry_seconds")
WATCH_S = 3600.0  # between looks whether the log has to warn


@asynccontextmanager
async def using(folder: str, role: MeshRole, name: str = "") -> AsyncIterator[Credentials | None]:
    """Yield the credentials of a service's setting, None where it is empty. Watch their expiry while the block runs.

    Raises ConfigError for a folder that cannot be used, and for one of another role or name: peers would refuse it.
    """
    credentials = open_credentials(folder)
    if credentials is not None:
        check_own(credentials.identity, folder, role, name)
    if credentials is None:
        yield None
        return
    EXPIRY.labels("own").set_function(lambda: credentials.member.expires_at_s - time.time())
    EXPIRY.labels("ca").set_function(lambda: credentials.ca_expires_at_s() - time.time())
    watching = asyncio.create_task(_watch(credentials), name="watch the certificate")
    try:
        yield credentials
    finally:
        watching.cancel()


def check_own(own: Identity, folder: str, role: MeshRole, name: str) -> None:
    """Raise ConfigError if a certificate is not that of a service of this role and name."""
    if own.role is not role:
        raise ConfigError(
            f"the certificate in {folder} is of the {own}, this is a {role}", hint=f"issue one with --role {role}"
        )
    if name and not own.stands_for(name):
        raise ConfigError(
            f"the certificate in {folder} is of the {own}, this is {name}",
            hint=f"issue one with --name {name}, or with the part of it before a dash",
        )


async def _watch(credentials: Credentials) -> None:
    while True:
        credentials.warn_before_expiry(time.time())
        await asyncio.sleep(WATCH_S)
