"""Accept all clients that wait for a listener, not one client per turn of the event loop.

uvloop accepts one connection per turn. Beside many busy streams a turn takes milliseconds, so that a burst of clients
would wait for seconds in the kernel, where no limit and no refusal reaches them.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

MOST_AT_ONCE = 64  # clients of one turn, so that the streams of other clients continue between two turns


class Burst:
    """Accept the clients that wait behind the one that the event loop has just accepted."""

    def __init__(self, connect: Callable[[], asyncio.Protocol], tls: Mapping[str, Any]) -> None:
        """Take `connect`, which makes the protocol of a connection, and the arguments of asyncio about TLS."""
        self._connect = connect
        self._tls = tls
        self._listeners: list[socket.socket] = []
        self._opening: set[asyncio.Task[None]] = set()

    def follow(self, server: asyncio.Server) -> None:
        """Accept from the sockets of `server` too."""
        self._listeners = [socket.socket(fileno=os.dup(listener.fileno())) for listener in server.sockets]
        for listener in self._listeners:
            listener.setblocking(False)

    def accept(self) -> int:
        """Accept the clients that wait, and return how many. Never waits itself.

        Call it for every connection that the event loop brings.
        """
        count = 0
        for listener in self._listeners:
            for _ in range(MOST_AT_ONCE):
                try:
                    client, _address = listener.accept()
                except OSError:  # nobody waits; or no file is free, which the event loop's own accept reports
                    break
                opening = asyncio.get_running_loop().create_task(self._open(client), name="open a connection")
                self._opening.add(opening)
                opening.add_done_callback(self._opening.discard)
                count += 1
        return count

    async def stop(self) -> None:
        """Accept the clients that wait in the kernel, and no more."""
        while self.accept():  # noqa: ASYNC110 - other tasks get their turn between two batches
            await asyncio.sleep(0)
        self._let_listeners_go()

    async def until_open(self) -> None:
        """Return when the connections of all clients that were accepted are open."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _let_listeners_go(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    async def _open(self, client: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._connect, client, **self._tls)
        except OSError as error:  # it has left again, or its handshake failed
            client.close()
            log.debug("a client was not connected: %s", error)

    async def close(self) -> None:
        """Stop accepting. Connections that are open already stay."""
        self._let_listeners_go()
        for opening in list(self._opening):
            opening.cancel()
        if self._opening:
            await asyncio.wait(self._opening)
