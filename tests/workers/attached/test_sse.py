"""Events of a stream come out whole, however the bytes were cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.errors import WireError
from kvmesh.workers.engines.attached.sse import SseReader

LINES = st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"").replace(b"\r", b"")), max_size=8)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(at % (len(data) + 1) for at in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(LINES, st.lists(st.integers(0, 1000), max_size=12), st.sampled_from([b"\n", b"\r\n"]))
def test_events_do_not_depend_on_how_the_bytes_arrive(events: list[bytes], cuts: list[int], end: bytes) -> None:
    body = b"".join(b"data: " + data + end + end for data in events)
    reader = SseReader()
    assert [event for piece in cut(body, cuts) for event in reader.feed(piece)] == events


def test_what_is_not_data_is_left_out() -> None:
    body = b": ping\n\nevent: x\nid: 7\ndata:one\n\nretry: 5\n\n"
    assert SseReader().feed(body) == [b"one"]


def test_an_event_of_several_lines_is_one() -> None:
    assert SseReader().feed(b"data: a\ndata: b\n\n") == [b"a\nb"]


def test_an_event_that_has_not_ended_is_not_told() -> None:
    assert SseReader().feed(b"data: a\n") == []


@pytest.mark.parametrize("pieces", [[b"data: " + b"x" * 30 + b"\n"], [b"x" * 10] * 4, [b"data: 12345\n"] * 9])
def test_an_event_has_a_largest_size(pieces: list[bytes]) -> None:
    reader = SseReader(max_event_bytes=30)
    with pytest.raises(WireError, match="30 bytes"):
        for piece in pieces:
            reader.feed(piece)
