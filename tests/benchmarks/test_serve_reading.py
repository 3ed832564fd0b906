"""One streamed answer, byte by byte, with the times that the test says."""

import itertools

import pytest

from kvmesh.commands.bench.reading import MOST_EVENT_BYTES, StreamReading
from tests.support.scripted_server import chunk, event

DONE = b"data: [DONE]\n\n"


def read(*parts: tuple[float, bytes], status: int = 200, why: str = "") -> StreamReading:
    reading = StreamReading(keeps_text=True)
    for now_s, data in parts:
        reading.feed(data, now_s)
    reading.end(status, why)
    return reading


def test_times_are_those_of_events_with_text() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    usage = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
    reading = read((1.0, role), (1.5, chunk("a")), (1.6, chunk("b")), (1.8, chunk("c", "length")), (2.5, usage + DONE))
    assert (reading.first_s, reading.last_s) == (1.5, 1.8)
    assert reading.gaps_s == pytest.approx([0.1, 0.2])
    assert (reading.completion_tokens, reading.prompt_tokens, reading.failure) == (3, 7, "")
    assert "".join(reading.texts) == "abc"


def test_cuts_between_reads_change_nothing() -> None:
    whole = b": ping\r\n\r\n" + chunk("a").replace(b"\n", b"\r\n") + chunk("b", "stop") + DONE
    for cut in range(1, len(whole)):
        reading = read((1.0, whole[:cut]), (2.0, whole[cut:]))
        assert (reading.events, reading.failure) == (2, ""), cut


def test_an_event_counts_at_the_read_that_ends_it() -> None:
    first = chunk("a")
    reading = read((1.0, first[:-1]), (3.0, first[-1:] + chunk("b", "stop") + DONE))
    assert (reading.first_s, reading.gaps_s) == (3.0, [0.0])


@pytest.mark.parametrize(
    "delta",
    [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"refusal": "no"}, {"tool_calls": [{"index": 0}]}],
)
def test_thoughts_and_calls_are_tokens_too(delta: dict[str, object]) -> None:
    said = event({"choices": [{"delta": delta, "finish_reason": "stop"}]})
    assert read((1.0, said + DONE)).events == 1


def test_text_completions_are_read_too() -> None:
    said = event({"choices": [{"text": "a", "finish_reason": "length"}]})
    assert read((1.0, said + DONE)).events == 1


@pytest.mark.parametrize(
    ("data", "status", "why", "failure"),
    [
        (b"", 503, "", "http 503"),
        (chunk("a"), 200, "cut short", "cut short"),
        (chunk("a"), 200, "", "cut short"),
        (chunk("a") + event({"error": {"message": "broke"}}) + DONE, 200, "", "error event"),
        (b"data: {no json\n\n", 200, "", "unreadable"),
        (b'data: {"choices": 3}\n\n', 200, "", "unreadable"),
        (DONE, 200, "", "no tokens"),
        (chunk("a", "stop"), 200, "timeout", "timeout"),
        (b"x" * (MOST_EVENT_BYTES + 1), 200, "", "unreadable"),
    ],
)
def test_each_failure_has_its_kind(data: bytes, status: int, why: str, failure: str) -> None:
    assert read((1.0, data), status=status, why=why).failure == failure


def test_null_errors_and_null_usage_are_nothing() -> None:
    said = event({"choices": [{"text": "a", "finish_reason": "length"}], "usage": None, "error": None})
    reading = read((1.0, said + DONE))
    assert (reading.failure, reading.completion_tokens) == ("", None)


def test_every_byte_may_be_a_read_of_its_own() -> None:
    whole = chunk("a") + chunk("b", "length") + DONE
    reading = read(*((number * 1.0, bytes([byte])) for number, byte in zip(itertools.count(), whole, strict=False)))
    assert (reading.events, reading.failure) == (2, "")
