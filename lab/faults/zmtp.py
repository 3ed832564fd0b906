"""Cut the byte stream of a ZMQ publisher into messages, so that a proxy can lose, repeat or reorder some. Pure.

ZMTP 3: a greeting of 64 bytes, then frames: one byte of flags, a length of one byte or eight, the body. A message is
all frames up to the first without the flag MORE. Commands, such as heartbeats, are messages of their own.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
MOST_BUFFERED = 64 << 20
MOST_HEARD = 16  # messages that a forger repeats
SEQUENCE_BYTES = 8  # of a KV event's number


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the stream that can be passed on as a whole."""

    data: bytes
    is_message: bool  # of the publisher; else it belongs to the connection and must come as it is


class ZmtpCutter:
    """Takes bytes as they come and returns whole pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeting_left = GREETING_BYTES

    def feed(self, data: bytes) -> list[Piece]:
        pieces: list[Piece] = []
        if self._greeting_left:  # each side waits for a part of the other's greeting: it is passed on as it comes
            greeting, data = data[: self._greeting_left], data[self._greeting_left :]
            self._greeting_left -= len(greeting)
            pieces.append(Piece(greeting, False))
        self._buffer += data
        while (end := self._next_end()) is not None:
            piece = bytes(self._buffer[:end])
            del self._buffer[:end]
            pieces.append(Piece(piece, not piece[0] & COMMAND))
        return pieces

    def _next_end(self) -> int | None:
        """Return where the first piece of the buffer ends, None if it has not come whole."""
        at = 0
        while True:
            head = 9 if at < len(self._buffer) and self._buffer[at] & LONG else 2
            if len(self._buffer) < at + head:
                return None
            flags = self._buffer[at]
            size = int.from_bytes(self._buffer[at + 1 : at + head], "big")
            at += head + size
            if at > MOST_BUFFERED:
                raise ValueError(f"a message of {at} bytes")
            if len(self._buffer) < at:
                return None
            if not flags & MORE:
                return at


@dataclass(slots=True)
class EventTrouble:
    """Say what happens to messages. `share` of them are hit."""

    kind: str = ""  # of lab/faults/kinds.py; "": nothing
    share: float = 0.0


class TroubledMessages:
    """Passes pieces on, with the trouble that is set at the time."""

    def __init__(self, trouble: EventTrouble, draw: random.Random) -> None:
        self._trouble = trouble
        self._draw = draw
        self._overtaken: bytes | None = None
        self._earlier: list[bytes] = []  # messages that a forger has heard

    def pass_on(self, piece: Piece) -> bytes:
        """Return the bytes to send for this piece."""
        if not piece.is_message:
            return piece.data
        held, self._overtaken = self._overtaken, None
        if held is not None:
            return piece.data + held
        kind = self._trouble.kind
        if not kind or self._draw.random() >= self._trouble.share:
            return piece.data
        match kind:
            case "events_lost":
                return b""
            case "events_repeated":
                return piece.data * 2
            case "events_reordered":
                self._overtaken = piece.data
                return b""
            case "events_flipped":
                return flipped(piece.data, self._draw)
            case "events_forged":
                self._earlier = [*self._earlier[1 - MOST_HEARD :], piece.data]
                return piece.data + forged(piece.data, self._draw.choice(self._earlier), self._draw)
        return piece.data


def forged(message: bytes, earlier: bytes, draw: random.Random) -> bytes:
    """Return what a second publisher at the same address sends: a message that lies about its number or its payload.

    `earlier`: a message that the first publisher has sent. A message that is no KV event is not forged.
    """
    frames, old = frames_of(message), frames_of(earlier)
    if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES or len(old) != 3:
        return b""
    topic, sequence, payload = frames
    number = int.from_bytes(sequence, "big")
    lies = (
        [topic, (number + draw.randrange(1, 1 << 40)).to_bytes(SEQUENCE_BYTES, "big"), payload],  # far ahead
        [topic, bytes(SEQUENCE_BYTES), payload],  # the first one again
        [topic, b"\xff" * SEQUENCE_BYTES, payload],  # the last one that there can be
        [topic, (number + 1).to_bytes(SEQUENCE_BYTES, "big"), old[2]],  # before the right one of that number
        [topic, sequence, old[2]],
        [topic, (number + 1).to_bytes(SEQUENCE_BYTES, "big"), draw.randbytes(len(payload))],
        [topic, draw.randbytes(draw.randrange(20)), payload],
        [draw.randbytes(12), sequence, payload],
        [topic, sequence],
        [topic, sequence, payload, payload],
        [topic, (number + 1).to_bytes(SEQUENCE_BYTES, "big"), b""],
    )
    return message_of(draw.choice(lies))


def frames_of(message: bytes) -> list[bytes]:
    """Return the bodies of the frames of a whole message."""
    frames, at = [], 0
    while at < len(message):
        head = 9 if message[at] & LONG else 2
        size = int.from_bytes(message[at + 1 : at + head], "big")
        frames.append(message[at + head : at + head + size])
        at += head + size
    return frames


def message_of(frames: Sequence[bytes]) -> bytes:
    """Return frames as a message on the wire."""
    parts = []
    for number, body in enumerate(frames):
        flags = LONG | (MORE if number + 1 < len(frames) else 0)
        parts.append(bytes([flags]) + len(body).to_bytes(8, "big") + body)
    return b"".join(parts)


def flipped(message: bytes, draw: random.Random) -> bytes:
    """Flip one bit in the last quarter of a message: in the body of its last frame, where the payload is."""
    spoiled = bytearray(message)
    first = len(spoiled) - max(1, len(spoiled) // 4)
    spoiled[draw.randrange(first, len(spoiled))] ^= 1 << draw.randrange(8)
    return bytes(spoiled)
