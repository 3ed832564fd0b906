"""host:port as peers write it: an IPv6 host stands in brackets."""


def join_address(host: str, port: int) -> str:
    """`host`: a name, or an IP address with or without brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """What a socket connects to. Raises ValueError if there is no port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
