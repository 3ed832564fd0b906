"""Read a TLS connection into one buffer of the process.

An event loop's TLS reads for a plain protocol into a new object of 256 KiB each time, which costs more than the rest of
the reading (docs/security.md, "Cost"). Reading and handing over is one step, so all connections share a buffer.
"""

import asyncio
from typing import Generic, TypeVar

_BUFFER = memoryview(bytearray(256 << 10))
P = TypeVar("P", bound=asyncio.Protocol)


class SharedBuffer(asyncio.BufferedProtocol, Generic[P]):
    """Reads for another protocol, and passes everything on to it."""

    def __init__(self, protocol: P) -> None:
        self.protocol = protocol
        self._take = protocol.data_received
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.protocol.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self._take(bytes(_BUFFER[:nbytes]))

    def eof_received(self) -> bool | None:
        return self.protocol.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self.protocol.connection_lost(error)
