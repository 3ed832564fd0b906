"""Ask a mesh over HTTP: one session with its API key and its certificate, for the commands that are clients."""

import os
import ssl
from typing import Annotated

import aiohttp
import msgspec
from msgspec import Meta, Struct

from kvmesh.mesh.identity.credentials import open_credentials
from kvmesh.protocol.errors import ConfigError, MeshError

DEFAULT_URL = "http://127.0.0.1:8000"  # where `kvmesh up` serves its API
API_KEY = "KVMESH_API_KEY"  # environment variable; a flag can be seen by other users of this machine


class ClientConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that all commands have which ask a mesh."""

    url: Annotated[str, Meta(description="HTTP API of a frontend")] = "http://127.0.0.1:8000"
    api_key: Annotated[str, Meta(description=f"key of a mesh that asks for one; default: {API_KEY}")] = ""
    ca_file: Annotated[
        str,
        Meta(description="PEM file with the certificate of the mesh's HTTPS, or of its issuer; default: the host's"),
    ] = ""


def open_session(
    api_key: str, ca_file: str, timeout_s: float, connections: int = 100, mesh_tls: str = ""
) -> aiohttp.ClientSession:
    """Return a client that sends the key and trusts what `ca_file` has signed. Raises ConfigError.

    Without a key, the one of the environment is sent, if there is one.
    With `mesh_tls`, the folder of a member, it talks to members of that mesh alone.
    """
    try:
        tls: ssl.SSLContext | bool = ssl.create_default_context(cafile=ca_file) if ca_file else True
        if (credentials := open_credentials(mesh_tls)) is not None:
            tls = credentials.dialing()
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or error
        raise ConfigError(f"cannot read {ca_file}: {why}", hint="--ca-file takes certificates in PEM") from error
    key = api_key or os.environ.get(API_KEY, "")
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(timeout_s),
        connector=aiohttp.TCPConnector(ssl=tls, limit=connections),
        headers={"authorization": f"Bearer {key}"} if key else {},
    )


def refusal_of(url: str, status: int, content: bytes, not_found: str = "") -> MeshError:
    """Return the error for an answer that is not 200; `not_found`: what to do if the path is not known there."""
    hints = {401: f"set {API_KEY}, or --api-key", 404: not_found}
    return MeshError(f"{url} answered {status}: {message_of(content)}", hint=hints.get(status, ""))


def message_of(content: bytes) -> str:
    """Return the message in an error body of ours, or the beginning of any other body."""
    try:
        return str(msgspec.json.decode(content)["error"]["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return beginning_of(content)


def beginning_of(content: bytes) -> str:
    """Return the beginning of a body for an error: one line, and no HTML."""
    if content.lstrip()[:1] == b"<":
        return "a page of HTML; is this the API?"
    return " ".join(content[:200].decode(errors="replace").split())
