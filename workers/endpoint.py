"""Say where a worker answers OpenAI's API to gateways, as an address that they can connect to."""

import logging
import socket
from urllib.parse import urlsplit

from kvmesh.mesh.address import join_address, split_address
from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.config import WorkerConfig

log = logging.getLogger(__name__)


def http_endpoint_of(config: WorkerConfig) -> str:
    """Return the ip:port; "" for a worker without such an API. Resolves names, so call it in a thread.

    Raise ConfigError if --http-endpoint is no address. An attached server whose name cannot be resolved has none.
    """
    if config.http_endpoint:
        return resolved(config.http_endpoint)
    if config.engine != "attach":
        return ""
    url = urlsplit(config.attach_url)
    try:
        return resolved(join_address(url.hostname or "", url.port or (443 if url.scheme == "https" else 80)))
    except ConfigError as error:
        log.warning("gateways cannot send requests to %s: %s", config.attach_url, error)
        return ""


def resolved(endpoint: str) -> str:
    """Return host:port with the IP address of the host, IPv4 first. Raise ConfigError."""
    try:
        host, port = split_address(endpoint)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM) if host and 0 < port <= 65535 else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"--http-endpoint {endpoint!r} has no address: {error}", hint="give it as ip:port") from error
    if not found:
        raise ConfigError(f"--http-endpoint is {endpoint!r}", hint="give it as ip:port")
    address = min(found, key=lambda one: one[0] != socket.AF_INET)[4]
    return join_address(str(address[0]), port)
