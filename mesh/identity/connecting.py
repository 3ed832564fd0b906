"""Connect a socket over TCP, before its handshake: the two have limits of their own."""

import asyncio
import socket


async def connected_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is connected to one of the addresses of a host. Raises OSError."""
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        raw = socket.socket(family, kind, protocol)
        raw.setblocking(False)
        try:
            await loop.sock_connect(raw, address)
        except OSError as error:
            raw.close()
            failure = error
        except BaseException:
            raw.close()
            raise
        else:
            return raw
    raise failure or OSError(f"{host} has no address")
