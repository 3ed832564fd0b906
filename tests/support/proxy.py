"""A TCP connection that a test can cut, or turn into a black hole."""

import asyncio
from collections.abc import Callable
from contextlib import suppress


class Proxy:
    """Listens on a free port of its own and passes on to `port`, until it is cut, and again once it is mended."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self.swallows_requests = False  # what clients send is read, and goes nowhere
        self.swallows_answers = False  # ... what the target sends
        self.port = 0
        self.calls = 0  # to workers for an answer, as long as both directions or one are swallowed

    async def start(self) -> "Proxy":
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def cut(self) -> None:
        """Break all connections; new ones are broken at once."""
        self._is_cut = True
        for writer in list(self._writers):
            writer.transport.abort()

    def mend(self) -> None:
        self._is_cut = False

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
        while self._writers:
            await asyncio.sleep(0)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            await asyncio.gather(
                self._pump(reader, far_writer, lambda: self.swallows_requests),
                self._pump(far_reader, writer, lambda: self.swallows_answers),
            )

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, swallows: Callable[[], bool]
    ) -> None:
        self._writers.add(writer)
        try:
            while data := await reader.read(1 << 16):
                if self.swallows_requests or self.swallows_answers:
                    self.calls += data.count(b"generate")
                if not swallows():
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
