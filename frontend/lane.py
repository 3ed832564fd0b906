"""The lane: the short way of a token that is text alone, from the worker's frame to the client's connection.

Nearly all deltas of nearly all streams are tokens whose text the client gets unchanged. Nothing else has to be done for
such a delta, so it is not even decoded: a chunk is its head, the texts of the tokens, and its tail. All other deltas go
the long way, in their order; the first and the last delta of an answer are among them.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvmesh.mesh.plane.client import Take
from kvmesh.protocol import native

MOST_TOKENS = 256  # of one delta


class PlainTokenLane:
    """The lane of one answer: specifies the native `TokenLane`, and stands in for it where that was not built.

    Implements kvmesh.mesh.plane.client.Shortcut.
    """

    __slots__ = (
        "_head", "_most", "_now", "_num_tokens", "_passed", "_tail", "_take", "_write",
        "generated", "last_token_s", "limit", "texts",
    )  # fmt: skip

    def __init__(self, now: Callable[[], float], write: Callable[[bytes], bool], head: bytes, tail: bytes) -> None:
        """Make the lane of one answer. `write` takes a chunk and returns whether the client keeps up."""
        self._now = now
        self._write = write
        self._head = head
        self._tail = tail
        self.texts: dict[int, bytes] | None = None  # of the next token, see Detokenizer.plain_texts; None: no lane now
        self.generated: list[int] = []  # where the tokens are noted
        self.limit = sys.maxsize  # of their number: a message beyond it goes the long way
        self.last_token_s = 0.0  # when the last one passed
        self._take: Take | None = None
        self._most = self._passed = self._num_tokens = 0

    def bind(self, take: Take, most: int) -> None:
        """Bind the lane to a stream. A message that has to go the long way is given to `take`, with the number of
        messages that passed since the last one. So is a message after `most` others."""
        self._take = take
        self._most = most
        self._passed = 0

    def release(self) -> None:
        """Let go of `take`."""
        self._take = None

    def __call__(self, raw: msgspec.Raw) -> bool:
        """Take one message of msgpack; return whether the client keeps up, or what `take` returns."""
        if self._take is None:
            raise RuntimeError("the lane is not bound to a stream")
        if (texts := self.texts) is not None and self._passed < self._most and (ids := _tokens_alone(raw)):
            plain = [texts[token_id] for token_id in ids]
            if b"" not in plain and len(self.generated) + len(ids) <= self.limit:
                self.generated += ids
                self.last_token_s = self._now()
                self._num_tokens += len(ids)
                self._passed += 1
                return self._write(b"".join((self._head, *plain, self._tail)))
        passed, self._passed = self._passed, 0
        return self._take(raw, passed)

    def take_count(self) -> int:
        """Return how many tokens passed since the last call."""
        count, self._num_tokens = self._num_tokens, 0
        return count


def _tokens_alone(raw: msgspec.Raw) -> list[int]:
    """Return the tokens of a `protocol.messages.Delta` that has nothing else, as msgspec writes it; else none."""
    try:
        tokens, *others = msgspec.msgpack.decode(raw)
        usual = msgspec.msgpack.encode([tokens, *others])
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError):
        return []
    if usual != bytes(raw) or any(other is not None for other in others) or not isinstance(tokens, list):
        return []
    if len(tokens) > MOST_TOKENS or not all(type(token) is int and 0 <= token < 1 << 32 for token in tokens):
        return []
    return tokens


NATIVE = False
if native.WANTED:
    try:
        from kvmesh.frontend import _native

        NATIVE = hasattr(_native.TokenLane, "limit")  # else it was built from older sources
    except ImportError:  # it was not built
        pass

if TYPE_CHECKING or not NATIVE:  # noqa: SIM108 - a type checker has to see a plain name
    TokenLane = PlainTokenLane
else:
    TokenLane = _native.TokenLane
