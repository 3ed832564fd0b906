"""W3C Trace Context: which trace a request belongs to, read from headers and written to them.

https://www.w3.org/TR/trace-context/: `traceparent` is version-trace id-span id-flags in hex, `tracestate` is data of
others, which is passed on as it is.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, Token
from random import getrandbits
from typing import NamedTuple

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE_CHARS = 512
STARTS_AT_ONCE = 256
_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]+")


Headers = Sequence[tuple[str, str]]  # names in lower case


class TraceContext(NamedTuple):
    """The trace of a request, and the span of whoever asked."""

    trace_id: str  # 32 hex digits
    parent_id: str = ""  # 16 hex digits, "" for the first of a trace
    is_sampled: bool = False
    state: str = ""  # tracestate

    def header(self, span_id: str) -> str:
        """Return the traceparent for what is asked within the span."""
        return traceparent(self.trace_id, span_id, is_sampled=self.is_sampled)


def read_context(headers: Headers) -> TraceContext | None:
    """Return the context that a client has sent; None if it has sent none that can be read."""
    for name, _ in headers:
        if name == TRACEPARENT:
            break
    else:  # nearly always
        return None
    parents = [value for name, value in headers if name == TRACEPARENT]
    if len(parents) != 1 or (found := _PARENT.fullmatch(parents[0].strip())) is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    if more and version == "00":
        return None
    state = ",".join(value for name, value in headers if name == TRACESTATE)
    if len(state) > MAX_STATE_CHARS or not _STATE.fullmatch(state):
        state = ""
    return TraceContext(trace_id, parent_id, bool(int(flags, 16) & 1), state)


def traceparent(trace_id: str, span_id: str, *, is_sampled: bool) -> str:
    """Return the header for what is asked within a span."""
    return f"00-{trace_id}-{span_id}-{'01' if is_sampled else '00'}"


def is_sampled(parent: str) -> bool:
    """Return whether the caller makes spans for a traceparent; False if there is none."""
    return parent.endswith("-01")


def trace_id_of(parent: str) -> str:
    """Return the trace id of a traceparent, "" of none."""
    return parent[3:35]


def span_id_of(parent: str) -> str:
    """Return the span id of a traceparent, "" of none."""
    return parent[36:52]


def new_span_id() -> str:
    return (getrandbits(64) or 1).to_bytes(8).hex()


class TraceStarts:
    """Begin traces, of which a share is sampled. A supply of ids is made at once, which costs less for each."""

    def __init__(self, share: float) -> None:
        # The last 56 bits of a trace id are random, says W3C: they decide whether it is sampled. Hex compares as text.
        limit = int(share * (1 << 56))
        below = f"{limit:014x}" if limit < 1 << 56 else "g"
        # Returns the traceparent of a new trace and its first span, and whether the trace is sampled.
        self.begin: Callable[[], tuple[str, bool]] = _endless(below).__next__


def _endless(below: str) -> Iterator[tuple[str, bool]]:
    while True:
        for begun in supply():
            yield (begun[:-1] + "1", True) if begun[21:35] < below else (begun, False)


def supply() -> list[str]:
    """Return traceparents of new traces that are not sampled. All of them have random ids."""
    ids = os.urandom(24 * STARTS_AT_ONCE).hex()
    return [f"00-{ids[at : at + 32]}-{ids[at + 32 : at + 48]}-00" for at in range(0, len(ids), 48)]


_outgoing: ContextVar[tuple[str, str]] = ContextVar("outgoing_trace", default=("", ""))


def set_outgoing(traceparent: str, tracestate: str) -> Token[tuple[str, str]]:
    """Give a trace to what is asked of others from now on, also in tasks that are started."""
    return _outgoing.set((traceparent, tracestate))


def reset_outgoing(token: Token[tuple[str, str]]) -> None:
    """Take back what `set_outgoing` gave."""
    _outgoing.reset(token)


def outgoing_trace_id() -> str:
    """Return the id of the trace that this runs for, "" for none."""
    return trace_id_of(_outgoing.get()[0])


def trace_headers() -> dict[str, str]:
    """Return the headers for a call to a server, none if the request belongs to no trace."""
    parent, state = _outgoing.get()
    if not parent:
        return {}
    return {TRACEPARENT: parent, TRACESTATE: state} if state else {TRACEPARENT: parent}
