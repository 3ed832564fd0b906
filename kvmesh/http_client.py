"""Ask a mesh over HTTP: one session with its API key and its certificate, for the commands that are clients."""

import ssl

import aiohttp
import msgspec

from mesh.identity.credentials import open_credentials
from protocol.errors import ConfigError

API_KEY = "KVMESH_API_KEY"  # environment variable; a flag can be seen by other users of this machine


def open_session(
    api_key: str, ca_file: str, timeout_s: float, connections: int = 100, mesh_tls: str = ""
) -> aiohttp.ClientSession:
    """Return a client that sends the key and trusts what `ca_file` has signed. Raises ConfigError.

    With `mesh_tls`, the folder of a member, it talks to members of that mesh alone.
    """
    try:
        tls: ssl.SSLContext | bool = ssl.create_default_context(cafile=ca_file) if ca_file else True
        if (credentials := open_credentials(mesh_tls)) is not None:
            tls = credentials.dialing()
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or error
        raise ConfigError(f"cannot read {ca_file}: {why}", hint="--ca-file takes certificates in PEM") from error
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(timeout_s),
        connector=aiohttp.TCPConnector(ssl=tls, limit=connections),
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
    )


def message_of(content: bytes) -> str:
    """Return the message in an error body of ours, or the beginning of any other body."""
    try:
        return str(msgspec.json.decode(content)["error"]["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
