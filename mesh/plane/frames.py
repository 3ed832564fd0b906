"""Encode and decode the frames of the request plane. Pure: bytes in, frames out, and back.

    u32 LE length | msgpack [tag, ...]

A connection carries many streams. The caller numbers them and grants credit: the other side sends at most that
many messages beyond those that the caller has taken. Messages of all streams that are ready in one turn of the event
loop share one Batch frame. An engine step therefore costs one write, for any number of streams.
"""

import mmap
import struct
from collections.abc import Sequence

import msgspec

from kvmesh.protocol.errors import WireError
from kvmesh.protocol.messages import UNREADABLE, Failure
from kvmesh.protocol.version import OLDEST_PROTOCOL, PROTOCOL_VERSION, RELEASE, UNNAMED_PROTOCOL, Versions

FRAMING = 2  # the layout of frames; the protocol's version counts everything else
MAX_FRAME_BYTES = 32 << 20  # of an answer: the logprobs of a prompt have some 10 MB
MAX_CALL_BYTES = 16 << 20  # that a caller sends at once: a prompt of 4 million tokens
MAX_HELLO_BYTES = 4 << 10  # of the first frame: its sender may be anybody
COPIED_BYTES = 64 << 10  # a larger frame has memory of its own
_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first frame of the caller. Releases before 0.2 send the framing alone, and ignore the rest."""

    framing: int = FRAMING
    protocol: int = UNNAMED_PROTOCOL
    oldest_protocol: int = UNNAMED_PROTOCOL
    release: str = ""

    @property
    def versions(self) -> Versions:
        return Versions(self.protocol, self.oldest_protocol, self.release)


OUR_HELLO = Hello(FRAMING, PROTOCOL_VERSION, OLDEST_PROTOCOL, RELEASE)


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1):
    stream: int
    method: str
    timeout_s: float  # time left until the deadline; clocks differ between hosts, durations do not
    credit: int
    body: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=2):
    stream: int


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=3):
    stream: int
    messages: int


class Batch(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Messages of streams in their order, then the streams that have ended, each with its failure if it failed."""

    messages: list[tuple[int, msgspec.Raw]]
    ends: list[tuple[int, Failure | None]]
    number: int = 0  # from 1 on each connection; releases before 0.3 send none


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=5):
    pass


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=6):
    pass


Frame = Hello | Open | Cancel | Credit | Batch | Ping | Pong
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    """Raises WireError if the frame is larger than peers accept."""
    payload = _encoder.encode(frame)
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into frames. A frame takes memory as its bytes come, however many are announced."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES, max_first_bytes: int | None = None) -> None:
        """Make a reader. Without `max_first_bytes` the first frame may be as large as any."""
        self._max_frame_bytes = max_frame_bytes
        self._limit_bytes = max_frame_bytes if max_first_bytes is None else max_first_bytes  # of the next frame
        self._buffer = bytearray()
        self.refusal: WireError | None = None  # of what follows the frames
        self._large: _LargeFrame | None = None  # the next frame; the buffer is empty then

    @property
    def held_bytes(self) -> int:
        """Return how many bytes of a frame have come that is not complete."""
        return len(self._buffer) if self._large is None else self._large.held_bytes

    def clear(self) -> None:
        self._buffer = bytearray()
        self._large = None

    def feed(self, data: bytes) -> Sequence[Frame]:
        """Take bytes as they come; return the frames that they complete. Raises WireError: the caller then hangs up.

        After the frames that it returns the caller hangs up too if `refusal` is set.
        """
        frames: list[Frame] = []
        if self._large is not None:
            rest = self._large.fill(memoryview(data))
            if self._large.is_incomplete:
                return frames
            whole, self._large = self._large, None
            frames.append(whole.frame())
            self._buffer += rest
        else:
            self._buffer += data
        start, size = 0, len(self._buffer)
        while size - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self._limit_bytes:
                self.refusal = WireError(f"a frame of {length} bytes is announced, the limit is {self._limit_bytes}")
                self._buffer = bytearray()
                return self._or_refuse(frames)
            self._limit_bytes = self._max_frame_bytes
            end = start + _LENGTH.size + length
            if size < end:
                if length > COPIED_BYTES:
                    self._large = _LargeFrame(length, memoryview(self._buffer)[start + _LENGTH.size :])
                    self._buffer = bytearray()
                    return frames
                break
            frames.append(_decode_frame(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        if start:
            del self._buffer[:start]
        return frames

    def _or_refuse(self, frames: list[Frame]) -> list[Frame]:
        """Return the frames before a frame that is refused. Without any, raise the refusal."""
        if not frames and self.refusal is not None:
            raise self.refusal
        return frames


class _LargeFrame:
    """A frame that has not come as a whole. The system gives pages for what is written, and takes all back at once.

    The heap would not: many buffers that grow side by side leave holes in it, twice as large as what they hold.
    """

    def __init__(self, length: int, begin: memoryview) -> None:
        try:
            self._pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise WireError(f"there is no memory for a frame of {length} bytes: {error}") from error
        self._length = length
        self.held_bytes = 0
        self.fill(begin)

    @property
    def is_incomplete(self) -> bool:
        return self.held_bytes < self._length

    def fill(self, data: memoryview) -> memoryview:
        """Take the bytes that belong to the frame; return the rest."""
        taken = data[: self._length - self.held_bytes]
        end = self.held_bytes + len(taken)
        self._pages[self.held_bytes : end] = taken
        self.held_bytes = end
        return data[len(taken) :]

    def frame(self) -> Frame:
        """Return the frame. Its messages refer to the pages."""
        return _decode_frame(memoryview(self._pages))


def _decode_frame(payload: bytes | memoryview) -> Frame:
    try:
        return _decoder.decode(payload)
    except UNREADABLE as error:
        raise WireError(f"unreadable frame: {error}", hint="is the peer a kvmesh of this version?") from error
