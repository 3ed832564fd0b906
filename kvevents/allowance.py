"""Limit how much one publisher may send: events and bytes per second, with room for bursts. Pure.

The events of a batch are read from its header, without decoding it. A header that cannot be read counts as the most
events that its bytes could hold.
"""

from dataclasses import dataclass

from kvmesh.kvevents.formats import MAX_EVENTS

_TS_BYTES = 9  # of a msgpack double, after the first byte of the batch
_LEAST_EVENT_BYTES = 3
_LEAST_REST_S = 0.5


@dataclass(frozen=True, slots=True)
class EventRates:
    """The rates that one publisher may keep up, and for how many seconds' worth it may be ahead of them."""

    events_per_s: float = 100_000.0
    bytes_per_s: float = float(16 << 20)
    burst_s: float = 4.0


class Allowance:
    """The allowance of one publisher: two buckets that fill with time. A batch may empty them below zero."""

    def __init__(self, rates: EventRates, now: float) -> None:
        self._rates = rates
        self._events = rates.events_per_s * rates.burst_s
        self._bytes = rates.bytes_per_s * rates.burst_s
        self._filled_at = now

    def take(self, payload: bytes, now: float) -> bool:
        """Return whether a batch may be taken now; it is counted if it may."""
        self._fill(now)
        if self._events <= 0 or self._bytes <= 0:
            return False
        self._events -= num_events(payload)
        self._bytes -= len(payload)
        return True

    def rest_s(self, now: float) -> float:
        """Return how long a publisher that sent too much is to be left alone: until its buckets are half full."""
        self._fill(now)
        rates = self._rates
        lacks_events = rates.events_per_s * rates.burst_s / 2 - self._events
        lacks_bytes = rates.bytes_per_s * rates.burst_s / 2 - self._bytes
        return max(_LEAST_REST_S, lacks_events / rates.events_per_s, lacks_bytes / rates.bytes_per_s)

    def _fill(self, now: float) -> None:
        passed_s, self._filled_at = max(0.0, now - self._filled_at), now
        rates = self._rates
        self._events = min(rates.events_per_s * rates.burst_s, self._events + passed_s * rates.events_per_s)
        self._bytes = min(rates.bytes_per_s * rates.burst_s, self._bytes + passed_s * rates.bytes_per_s)


def num_events(payload: bytes) -> int:
    """Return the number of events that the header of a batch announces, and no more than its bytes could hold."""
    most = min(MAX_EVENTS, max(1, len(payload) // _LEAST_EVENT_BYTES))
    at = 1 + _TS_BYTES
    if len(payload) <= at or payload[1] != 0xCB:
        return most
    first = payload[at]
    if 0x90 <= first <= 0x9F:
        return min(most, max(1, first & 0x0F))
    width = {0xDC: 2, 0xDD: 4}.get(first)
    return most if width is None else min(most, int.from_bytes(payload[at + 1 : at + 1 + width], "big"))
