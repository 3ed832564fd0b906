"""Stand between the processes of a mesh: proxies of TCP that hold up, delay, reset, forget or spoil what they carry."""

import asyncio
import random
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field

from kvmesh.lab.faults.zmtp import EventTrouble, TroubledMessages, ZmtpCutter, flipped

CHUNK_BYTES = 1 << 16
LOST_S = 0.2  # a lost packet is sent again after so long, at the earliest
CONNECT_S = 5.0


@dataclass(slots=True)
class Weather:
    """Say what happens on all ways to and from one process."""

    cuts: int = 0  # partitions that last: nothing passes
    delay_s: float = 0.0
    loss: float = 0.0  # share of chunks
    flips: float = 0.0  # share of chunks in which one bit is flipped
    events: EventTrouble = field(default_factory=EventTrouble)
    passes: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.passes.set()

    def cut(self) -> None:
        self.cuts += 1
        self.passes.clear()

    def heal(self) -> None:
        self.cuts -= 1
        if not self.cuts:
            self.passes.set()

    def wait_s(self, draw: random.Random) -> float:
        """Return how long the next chunk takes."""
        lost = self.loss > 0 and draw.random() < self.loss
        return self.delay_s + (LOST_S if lost else 0.0)


class _Way:
    """One connection through a proxy: the side of the client and the side of the process behind."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near, self.far = near, far
        self.is_forgotten = False  # the process has lost it, the client does not know

    def reset(self) -> None:
        for writer in (self.near, self.far):
            reset(writer)

    def forget(self) -> None:
        """Lose the process's side alone."""
        self.is_forgotten = True
        reset(self.far)


class TroubledProxy:
    """Listens at the address that a process advertises and passes on to the one where it listens."""

    def __init__(self, host: str, port: int, target_host: str, weather: Weather, *, zmtp: bool, seed: str) -> None:
        self.port = port
        self._host = host
        self._target_host = target_host
        self.weather = weather
        self._zmtp = zmtp
        self._draw = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._ways: set[_Way] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, self._host, self.port, limit=CHUNK_BYTES)

    def reset(self) -> None:
        for way in list(self._ways):
            way.reset()

    def forget(self) -> None:
        for way in list(self._ways):
            way.forget()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await self.weather.passes.wait()
            async with asyncio.timeout(CONNECT_S):
                far_reader, far_writer = await asyncio.open_connection(self._target_host, self.port, limit=CHUNK_BYTES)
        except (OSError, TimeoutError):
            reset(writer)
            return
        except asyncio.CancelledError:
            reset(writer)
            return
        await self._carry(reader, writer, far_reader, far_writer)

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        for one in (writer, far_writer):
            raw = one.get_extra_info("socket")
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        way = _Way(writer, far_writer)
        self._ways.add(way)
        pumps = {
            asyncio.create_task(self._pump(reader, far_writer, way, None)),
            asyncio.create_task(self._pump(far_reader, writer, way, ZmtpCutter() if self._zmtp else None)),
        }
        try:
            await asyncio.wait(pumps)
        except asyncio.CancelledError:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
        finally:
            self._ways.discard(way)
            for one in (writer, far_writer):
                one.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: _Way, cutter: ZmtpCutter | None
    ) -> None:
        weather = self.weather
        messages = TroubledMessages(weather.events, self._draw)
        try:
            while data := await reader.read(CHUNK_BYTES):
                if cutter is not None:
                    data = b"".join([messages.pass_on(piece) for piece in cutter.feed(data)])
                elif weather.flips and self._draw.random() < weather.flips:
                    data = flipped(data, self._draw)
                if (wait_s := weather.wait_s(self._draw)) > 0:
                    await asyncio.sleep(wait_s)
                await weather.passes.wait()
                if not way.is_forgotten and not writer.is_closing():
                    writer.write(data)
                    await writer.drain()
        except (OSError, ValueError, RuntimeError):
            pass  # one side is gone
        if way.is_forgotten:
            if writer is way.near:
                return  # the process's side has ended; the client's side stands until the client gives it up
            reset(way.near)
            return
        await weather.passes.wait()
        with suppress(OSError, RuntimeError):
            if writer.can_write_eof():
                writer.write_eof()
        if way.near.is_closing() or way.far.is_closing():
            way.reset()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a reset."""
    raw = writer.get_extra_info("socket")
    with suppress(OSError, AttributeError, ValueError):  # it may be closed already
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
