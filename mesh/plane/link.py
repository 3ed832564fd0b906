"""Run one side of a TCP connection: read frames, write them once in a turn of the loop, notice a dead peer."""

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import cast

import msgspec

from mesh.plane.frames import MAX_FRAME_BYTES, Batch, Frame, FrameReader, Ping, Pong, encode_frame
from mesh.silence import probe_when_silent, wire_of
from protocol.errors import MeshError, WireError
from protocol.messages import failure_of

log = logging.getLogger(__name__)

KEEPALIVE_S = 5.0  # a silent peer is asked this often while streams are open
WIRE_CHECK_S = 0.5  # while streams are open and what was sent may be on its way
CUT_CHECKS = 2  # a wire that is found cut so often in a row is given up
SILENT_CHECKS = 3  # ... or silent: where a host has no neighbour entry left, the kernel counts no packet as sent again
SUSPECT_S = 2.0  # time to answer for a peer that is thought to be gone
KEEPALIVE_MISSES = 3  # a peer is given up after so many unanswered questions
HIGH_WATER_BYTES = 1 << 20
UNREAD_BYTES = 2 * MAX_FRAME_BYTES  # senders wait long before: the peer does not read
BATCH_BYTES = 4 << 20  # a larger batch is sent before the turn of the loop ends


class Link(asyncio.Protocol, ABC):
    """A connection whose subclass handles the frames: `on_frame`, `on_lost`, `is_busy`."""

    def __init__(self, on_closed: Callable[["Link"], None]) -> None:
        self._on_closed = on_closed
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self.loop = asyncio.get_running_loop()
        self._writable = asyncio.Event()
        self._writable.set()
        self._batch = Batch([], [])
        self._batch_bytes = 0
        self._frames: list[bytes] = []  # written in this turn of the loop, before the batch
        self._flush_planned = False
        self._heard = True
        self._misses = 0
        self._keepalive: asyncio.TimerHandle | None = None
        self._socket: socket.socket | None = None
        self._wire_check: asyncio.TimerHandle | None = None
        self._has_sent = False  # since the wire was checked
        self._cut_checks = 0  # how often in a row the wire was found cut
        self._silent_checks = 0  # ... or silent
        self.was_cut = False  # the connection was given up for that
        self.closed = asyncio.Event()
        self.peer = "?"

    @abstractmethod
    def on_frame(self, frame: Frame) -> None:
        """Handle a frame that is neither Ping nor Pong. Raises WireError: the link hangs up then."""

    @abstractmethod
    def on_lost(self, reason: str) -> None:
        """Handle the end of the connection, on whichever side it ended. Called once."""

    @abstractmethod
    def is_busy(self) -> bool:
        """Say whether streams are open, so that a dead peer must be noticed."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if name else "?"
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            probe_when_silent(raw)
            self._socket = raw

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            for frame in self._reader.feed(data):
                if self.closed.is_set():
                    return
                match frame:
                    case Ping():
                        self.write(Pong())
                    case Pong():
                        pass
                    case _:
                        self.on_frame(frame)
        except WireError as error:
            log.warning("hanging up on %s: %s", self.peer, error)
            self.abort(str(error))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(str(error) if error else "the peer closed the connection")

    # for the subclasses and their streams

    def write(self, frame: Frame) -> None:
        """Send at the end of this turn of the loop, after what is in its batch by now."""
        self._end_batch()
        self._frames.append(encode_frame(frame))
        self._plan_flush()

    def add_message(self, stream: int, message: bytes) -> None:
        """Send with this turn's batch."""
        if self._batch_bytes + len(message) > BATCH_BYTES:
            self._flush()
        self._batch_bytes += len(message)
        self._batch.messages.append((stream, msgspec.Raw(message)))
        self._plan_flush()

    def add_end(self, stream: int, failure: MeshError | None) -> None:
        self._batch.ends.append((stream, None if failure is None else failure_of(failure)))
        self._plan_flush()

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            self.loop.call_soon(self._flush)

    def _end_batch(self) -> None:
        """Close the batch, so that its messages go before the next frame."""
        self._batch_bytes = 0
        if self._batch.messages or self._batch.ends:
            batch, self._batch = self._batch, Batch([], [])
            self._frames.append(encode_frame(batch))

    @property
    def writable(self) -> bool:
        return self._writable.is_set()

    async def until_writable(self) -> None:
        await self._writable.wait()

    def watch_peer(self) -> None:
        """Notice from now on, while streams are open, a peer that falls silent."""
        if self._keepalive is None:
            self._heard, self._misses = True, 0
            self._keepalive = self.loop.call_later(KEEPALIVE_S, self._check_peer)

    def _watch_wire(self) -> None:
        """Notice packets that get no answer. Where nothing is sent, the kernel probes the connection."""
        self._has_sent = True
        if self._wire_check is None and self.is_busy():
            self._wire_check = self.loop.call_later(WIRE_CHECK_S, self._check_wire)

    def _check_wire(self) -> None:
        """Hang up if packets get no answer. A peer that hangs or does not read answers by its kernel."""
        self._wire_check = None
        if self._transport is None or self._socket is None or not self.is_busy():
            self._cut_checks = self._silent_checks = 0
            return
        wire = wire_of(self._socket)
        self._cut_checks = self._cut_checks + 1 if wire.is_cut else 0
        self._silent_checks = self._silent_checks + 1 if wire.is_silent else 0
        if self._cut_checks >= CUT_CHECKS or self._silent_checks >= SILENT_CHECKS:
            self.was_cut = True
            self.abort("the peer's host does not answer")
        elif wire.is_waiting or self._has_sent:
            self._has_sent = False
            self._wire_check = self.loop.call_later(WIRE_CHECK_S, self._check_wire)

    def suspect(self, reason: str) -> None:
        """Ask a peer that may be gone, and hang up if it does not answer soon, long before the keepalive would."""
        if self._transport is not None:
            self._heard = False
            self.write(Ping())
            self.loop.call_later(SUSPECT_S, self._abort_unless_heard, reason)

    def _abort_unless_heard(self, reason: str) -> None:
        if not (self._heard or self.closed.is_set()):
            self.abort(f"{reason}, and it does not answer")

    def abort(self, reason: str) -> None:
        transport = self._transport
        self._lose(reason)
        if transport is not None:
            transport.abort()

    def close(self) -> None:
        """Send the waiting frames, then close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        """Write all frames of this turn at once: a system call costs more than most of them."""
        self._flush_planned = False
        self._end_batch()
        if not self._frames:
            return
        frames, self._frames = self._frames, []
        if self._transport is None:
            return
        self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))
        self._watch_wire()
        if self._transport.get_write_buffer_size() > UNREAD_BYTES:
            self.abort(f"the peer has left {UNREAD_BYTES >> 20} MiB unread")

    def _check_peer(self) -> None:
        self._keepalive = None
        if self._transport is None or not self.is_busy():
            return
        self._misses = 0 if self._heard else self._misses + 1
        if self._misses >= KEEPALIVE_MISSES:
            self.abort(f"the peer has been silent for {KEEPALIVE_S * KEEPALIVE_MISSES:.0f} s")
            return
        if not self._heard:
            self.write(Ping())
        self._heard = False
        self._keepalive = self.loop.call_later(KEEPALIVE_S, self._check_peer)

    def _lose(self, reason: str) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        self._transport = None
        self._writable.set()  # those that wait to write then see that the connection is over
        self._socket = None
        for timer in (self._keepalive, self._wire_check):
            if timer is not None:
                timer.cancel()
        self._batch = Batch([], [])
        self._frames.clear()
        self.on_lost(reason)
        self._on_closed(self)
