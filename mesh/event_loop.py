"""Provide the event loop of all services: uvloop's, where each descriptor has one owner."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import uvloop


class ServiceLoop(uvloop.Loop):  # type: ignore[misc]
    """Give the descriptor of a socket to its transport alone.

    If a connection breaks during its first write, uvloop closes the descriptor but leaves its number in the Python
    socket. The garbage collector later closes that number again, although it may belong to ZMQ or another connection.
    """

    async def create_connection(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        *,
        sock: socket.socket | None = None,
        **options: Any,
    ) -> Any:
        """The transport becomes the only owner of the descriptor of `sock`, also if the connection fails."""
        try:
            return await super().create_connection(protocol_factory, host, port, sock=sock, **options)
        finally:
            if sock is not None:
                sock.detach()
