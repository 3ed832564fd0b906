"""Addresses as peers write them: host:port, with an IPv6 host in brackets."""

from kvmesh.protocol.errors import ConfigError


def join_address(host: str, port: int) -> str:
    """Return host:port. `host` is a name, or an IP address with or without brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port. Raises ValueError if there is no port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {join_address(host, port)}: {error.strerror or error}",
        hint="choose another port, or another --host",
    )
