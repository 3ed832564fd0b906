"""Encode and decode the frames of the request plane. Pure: bytes in, frames out, and back.

    u32 LE length | msgpack [tag, ...]

A connection carries many streams. The caller numbers them and grants credit: the other side sends at most that
many messages beyond those that the caller has taken. Messages of all streams that are ready in one turn of the event
loop share one Batch frame. An engine step therefore costs one write, for any number of streams.
"""

import struct
from collections.abc import Sequence

import msgspec

from protocol.errors import WireError
from protocol.messages import UNREADABLE, Failure
from protocol.version import OLDEST_PROTOCOL, PROTOCOL_VERSION, RELEASE, UNNAMED_PROTOCOL, Versions

FRAMING = 2  # the layout of frames; the protocol's version counts everything else
MAX_FRAME_BYTES = 64 << 20
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
    """Cuts a byte stream into frames. A frame that is too large is refused before it takes memory."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Sequence[Frame]:
        """Take bytes as they come; return the frames that they complete. Raises WireError: the caller then hangs up."""
        self._buffer += data
        frames: list[Frame] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self._max_frame_bytes:
                raise WireError(f"a frame of {length} bytes is announced, the limit is {self._max_frame_bytes}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(_decode_frame(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        if start:
            del self._buffer[:start]
        return frames


def _decode_frame(payload: bytes) -> Frame:
    try:
        return _decoder.decode(payload)
    except UNREADABLE as error:
        raise WireError(f"unreadable frame: {error}", hint="is the peer a kvmesh of this version?") from error
