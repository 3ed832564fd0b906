"""A publisher may send so many events and bytes per second, and no more."""

import pytest

from kvmesh.kvevents.allowance import Allowance, EventRates, num_events
from kvmesh.kvevents.formats import MAX_EVENTS, encode_payload
from tests.support.kv_events import blocks, payload

RATES = EventRates(events_per_s=10, bytes_per_s=1e6, burst_s=2)


def test_a_publisher_within_its_rates_is_always_heard() -> None:
    allowance = Allowance(RATES, 0.0)
    assert all(allowance.take(payload(*range(5)), 0.5 * number) for number in range(1, 100))


def test_events_beyond_the_burst_are_refused() -> None:
    allowance = Allowance(EventRates(events_per_s=10, bytes_per_s=1e9, burst_s=2), 0.0)
    assert [allowance.take(payload(*range(10)), 0.0) for _ in range(3)] == [True, True, False]


def test_bytes_beyond_the_burst_are_refused() -> None:
    allowance = Allowance(EventRates(events_per_s=1e9, bytes_per_s=100, burst_s=2), 0.0)
    assert [allowance.take(bytes(150), 0.0) for _ in range(3)] == [True, True, False]


def test_after_its_rest_a_publisher_may_send_half_a_burst() -> None:
    allowance = Allowance(RATES, 0.0)
    while allowance.take(payload(1), 0.0):
        pass
    rest_s = allowance.rest_s(0.0)
    assert 0.5 <= rest_s <= 2.0
    taken = 0
    while allowance.take(payload(1), rest_s):
        taken += 1
    assert taken >= 9


def test_a_clock_that_stands_still_gives_nothing() -> None:
    allowance = Allowance(RATES, 5.0)
    while allowance.take(payload(1), 5.0):
        pass
    assert not allowance.take(payload(1), 4.0)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 300, 65_536])
def test_the_events_of_a_batch_are_read_from_its_header(count: int) -> None:
    assert num_events(encode_payload(blocks(*range(count)), 1.0)) == max(1, count)


@pytest.mark.parametrize(
    ("what", "most"),
    [(b"", 1), (b"\x93", 1), (b"\xc1" * 30, 10), (b"\xc1" * (1 << 20), MAX_EVENTS), (b"\x93\xcb" + bytes(8), 3)],
)
def test_an_unreadable_header_counts_as_the_most_it_could_hold(what: bytes, most: int) -> None:
    assert num_events(what) == most


def test_a_header_cannot_announce_more_events_than_bytes() -> None:
    assert num_events(b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff") == 5
