"""Run one side of a TCP connection: read frames, write them once in a turn of the loop, notice a dead peer."""

import asyncio
import logging
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import msgspec

from kvmesh.mesh.identity.credentials import ShownIdentity, member_of
from kvmesh.mesh.identity.listening import ToldOnce
from kvmesh.mesh.plane.bounds import Bounds
from kvmesh.mesh.plane.frames import MAX_FRAME_BYTES, Batch, Frame, FrameReader, Ping, Pong, encode_frame
from kvmesh.mesh.plane.metrics import HANGUPS
from kvmesh.mesh.plane.peer_watch import PeerWatch
from kvmesh.mesh.silence import probe_when_silent
from kvmesh.protocol.errors import IdentityError, MeshError, WireError
from kvmesh.protocol.messages import failure_of

log = logging.getLogger(__name__)

HIGH_WATER_BYTES = 1 << 20
UNREAD_BYTES = MAX_FRAME_BYTES + (8 << 20)  # senders wait long before: the peer does not read
BATCH_BYTES = 1 << 20  # a larger batch is sent before the turn of the loop ends
LINGER_S = 1.0  # after a hang-up that says why: a reset would destroy the words before a sending peer reads them
FAREWELL = 0  # the number of no stream: its failure is why the server hangs up; releases before 0.3 ignore it
# A client's first record of TLS, and an alert. No first frame of ours begins so: its tag is another.
_TLS_BEGINNING = re.compile(rb"\x16\x03[\x01-\x04]..\x01|\x15\x03[\x01-\x04]\x00\x02", re.DOTALL)

told_tls = ToldOnce()  # hosts whose TLS was refused


def tls_refusal(peer: str) -> IdentityError:
    """Return the error of a peer that speaks TLS where this process does not. The log has it once for each host."""
    error = IdentityError("the peer uses TLS and this process does not", hint="start it with --mesh-tls")
    if told_tls.is_new(peer.rpartition(":")[0]):
        log.warning("hanging up on %s: %s", peer, error)
    return error


class Link(asyncio.Protocol, ABC):
    """A connection whose subclass handles the frames: `on_frame`, `on_lost`, `is_busy`, `is_hasty`."""

    def __init__(self, on_closed: Callable[["Link"], None], bounds: Bounds, reader: FrameReader) -> None:
        self._on_closed = on_closed
        self._bounds = bounds
        self._reader = reader
        self._holds_part = False  # of a frame
        self._transport: asyncio.Transport | None = None
        self.loop = asyncio.get_running_loop()
        self._writable = asyncio.Event()
        self._writable.set()
        self._batch = Batch([], [])
        self._batch_bytes = 0
        self._sent_batches = 0
        self._frames: list[bytes] = []  # written in this turn of the loop, before the batch
        self._flush_planned = False
        self.watch = PeerWatch(self)
        self.is_paused = False  # nothing is read, because consumers are behind
        self.closed = asyncio.Event()
        self.peer = "?"
        self.is_greeted = False
        self.idle_since_s = self.loop.time()  # while no streams are open
        self.member: ShownIdentity | None = None  # who the peer is, where the mesh has certificates
        self.on_pong: Callable[[], None] | None = None
        self._has_read = False

    @abstractmethod
    def on_frame(self, frame: Frame) -> None:
        """Handle a frame that is neither Ping nor Pong. Raises WireError: the link hangs up then."""

    @abstractmethod
    def on_lost(self, reason: str) -> None:
        """Handle the end of the connection, on whichever side it ended. Called once."""

    @abstractmethod
    def is_busy(self) -> bool:
        """Say whether streams are open, so that a dead peer must be noticed."""

    @property
    def peer_name(self) -> str:
        """Return the peer that has to share with others what its connections take."""
        return str(self.member.identity) if self.member is not None else self.peer.rpartition(":")[0]

    def is_hasty(self) -> bool:
        """Say whether a dead peer must be noticed soon, because a call could continue elsewhere."""
        return False

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
            self.watch.connection = raw
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            self.member = member_of(tls)  # the handshake has checked it

    def data_received(self, data: bytes) -> None:
        if self.closed.is_set():  # the link hangs up, and the peer does not know it yet
            return
        self.watch.pulse.heard_bytes += len(data)
        if not self._has_read:
            self._has_read = True
            if self.member is None and _TLS_BEGINNING.match(data):
                self.abort(str(tls_refusal(self.peer)))
                return
        try:
            frames = self._reader.feed(data)
            if self._holds_part or self._reader.held_bytes:
                self._note_part(is_another=bool(frames))
            for frame in frames:
                if self.closed.is_set():
                    return
                match frame:
                    case Ping():
                        self.write(Pong())
                    case Pong():
                        self.watch.on_pong()
                        if self.on_pong is not None:
                            self.on_pong()
                    case _:
                        self.on_frame(frame)
            if self._reader.refusal is not None:
                raise self._reader.refusal
        except WireError as error:
            HANGUPS.labels("unreadable").inc()
            self.hang_up(error)

    def _note_part(self, *, is_another: bool) -> None:
        """Report how much of an incomplete frame is held. If it is too much, a connection ends: perhaps this one."""
        held_bytes = self._reader.held_bytes
        self._holds_part = held_bytes > 0
        self._bounds.assemble(self, held_bytes, self.loop.time(), anew=is_another)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
        self._bounds.unsent(self, 0, 0.0)

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
            self._sent_batches += 1
            self._frames.append(encode_frame(Batch(batch.messages, batch.ends, self._sent_batches)))

    @property
    def writable(self) -> bool:
        return self._writable.is_set()

    async def until_writable(self) -> None:
        await self._writable.wait()

    def abort(self, reason: str) -> None:
        transport = self._transport
        self._lose(reason)
        if transport is not None:
            transport.abort()

    def hang_up(self, error: MeshError) -> None:
        """Tell a peer that has said Hello, and reads, why the connection ends. What the peer still sends is dropped."""
        log.warning("hanging up on %s: %s", self.peer, error)
        transport = self._transport
        if transport is None or not (self.is_greeted and self._writable.is_set()):
            self.abort(str(error))
            return
        self.add_end(FAREWELL, error)
        self._flush()
        self._lose(str(error))
        with suppress(OSError, NotImplementedError):  # the connection is gone already
            if transport.can_write_eof() and not transport.is_closing():
                transport.write_eof()
        self.loop.call_later(LINGER_S, transport.abort)

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
        self.watch.note_sent()
        if not self._writable.is_set():
            self._note_unsent(self._transport.get_write_buffer_size())

    def _note_unsent(self, unsent_bytes: int) -> None:
        """Report how much the peer has left unread. If it is too much, a connection ends: perhaps this one."""
        if unsent_bytes > UNREAD_BYTES:
            HANGUPS.labels("unread").inc()
            self.abort(f"the peer has left {UNREAD_BYTES >> 20} MiB unread")
        else:
            self._bounds.unsent(self, unsent_bytes, self.loop.time())

    def _lose(self, reason: str) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        self._transport = None
        self._writable.set()  # those that wait to write then see that the connection is over
        self.watch.close()
        self._batch = Batch([], [])
        self._frames.clear()
        self._reader.clear()
        self._bounds.leave(self)
        self.on_lost(reason)
        self._on_closed(self)
