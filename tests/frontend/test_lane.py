"""Deltas that are text alone take a lane of their own: what the client gets is the same, byte for byte."""

import gc
import re
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmesh.frontend import outlet
from kvmesh.frontend.answer import GrowingAnswer
from kvmesh.frontend.lane import MOST_TOKENS, NATIVE, PlainTokenLane, TokenLane
from kvmesh.frontend.outlet import SseOutlet
from kvmesh.protocol.messages import Delta, Feature, FinishReason, encode
from tests.frontend import tiny
from tests.frontend.serving import CHAT, END, TEXT, Served, ids, scored, serving
from tests.support.implementations import LANES, NOT_BUILT

PARTS = ("a fox", ' says "hi"', "\n\t\\ ", "grün 日本", "\u2028", "🦊", "<|im_end|>", " and goes", "\x00\x7f", " on")
MESSAGES = {**CHAT, "max_tokens": 64}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat, with usage": ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
    "chat, two answers": ("/v1/chat/completions", CHAT | {"n": 2}),
    "completion": ("/v1/completions", TEXT),
    "completion, echoed": ("/v1/completions", TEXT | {"echo": True}),
    "messages": ("/v1/messages", MESSAGES),
    "responses": ("/v1/responses", {"model": "tiny", "input": "hi"}),
}
LONG_WAY = {
    "a stop string": CHAT | {"stop": "no such"},
    "logprobs": CHAT | {"logprobs": True},
}


def script(tokens_per_delta: int) -> list[Delta]:
    """Characters of several tokens are cut within."""
    tokens = [token for part in PARTS for token in ids(part)]
    cuts = range(0, len(tokens), tokens_per_delta)
    deltas = [Delta(tuple(tokens[n : n + tokens_per_delta])) for n in cuts]
    return [*deltas, Delta((END,), FinishReason.STOP, stop_token=END)]


async def streamed(served: Served, path: str, body: dict[str, Any]) -> str:
    status, _, text = await served.post(path, body | {"stream": True})
    assert status == 200, text
    return re.sub(r'"(id|item_id)":"[^"]*"|"(created|created_at|completed_at)":\d+', "", text)


@pytest.fixture(params=LANES)
async def served(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """A model that neither thinks nor calls tools."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outlet, "TokenLane", request.param)
        async with serving_plain(tmp_path) as served:
            yield served


@asynccontextmanager
async def serving_plain(tmp_path: Path) -> AsyncIterator[Served]:
    card = tiny.card("w", path=tiny.save_model(tmp_path), context_tokens=4096)
    async with serving(replace(card, features=tuple(Feature))) as served:
        yield served


@pytest.mark.parametrize("tokens_per_delta", [1, 3])
@pytest.mark.parametrize("name", ASKED)
async def test_the_client_gets_the_same(
    served: Served, monkeypatch: pytest.MonkeyPatch, name: str, tokens_per_delta: int
) -> None:
    path, body = ASKED[name]
    served.generator.script = script(tokens_per_delta)
    by_lane = await streamed(served, path, body)
    monkeypatch.setattr(SseOutlet, "lane", lambda *_: None)
    assert by_lane == await streamed(served, path, body)
    assert by_lane.count("data: ") > len(PARTS)


THOUGHTS = ("<think>", "a", " fox", "?", "</think>", "\n\n")
THINKS = {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
THINKING = {"chat": ASKED["chat"], "messages": ("/v1/messages", MESSAGES | THINKS)}


@pytest.mark.parametrize("native", LANES)
@pytest.mark.parametrize("name", THINKING)
async def test_after_the_thoughts_tokens_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_way: list[Delta], name: str, native: Any
) -> None:
    monkeypatch.setattr(outlet, "TokenLane", native)
    card = tiny.card("w", path=tiny.save_model(tmp_path), context_tokens=4096)
    async with serving(replace(card, features=tuple(Feature), reasoning_parser="think")) as served:
        thoughts = [Delta((token,)) for part in THOUGHTS for token in ids(part)]
        served.generator.script = [*thoughts, *script(1)]
        by_lane = await streamed(served, *THINKING[name])
        went_long = len(long_way)
        monkeypatch.setattr(SseOutlet, "has_lanes", False)
        assert by_lane == await streamed(served, *THINKING[name])
    assert len(thoughts) < went_long < len(long_way) - went_long - 10


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[Delta]:
    """The deltas that do not take the lane."""
    seen: list[Delta] = []
    general = GrowingAnswer.on_delta

    def on_delta(self: GrowingAnswer, delta: Delta) -> Any:
        seen.append(delta)
        return general(self, delta)

    monkeypatch.setattr(GrowingAnswer, "on_delta", on_delta)
    return seen


async def test_first_last_and_incomplete_characters_go_the_long_way(served: Served, long_way: list[Delta]) -> None:
    fox = ids("🦊")
    assert len(fox) > 1
    plain = ids(" and goes on")
    served.generator.script = [
        Delta(ids("a")),
        *[Delta((token,)) for token in (*plain, *fox, *plain)],
        Delta(ids("!"), FinishReason.LENGTH),
    ]
    text = await streamed(served, "/v1/chat/completions", CHAT)
    assert "🦊" in text
    assert [delta.token_ids for delta in long_way] == [ids("a"), *[(token,) for token in fox], ids("!")]


@pytest.mark.parametrize("name", LONG_WAY)
async def test_what_needs_a_look_at_each_token_takes_none(served: Served, long_way: list[Delta], name: str) -> None:
    served.generator.script = [replace(delta, logprobs=scored(delta.token_ids)) for delta in script(1)]
    await streamed(served, "/v1/chat/completions", LONG_WAY[name])
    assert len(long_way) == len(script(1))


async def test_usage_counts_tokens_of_both_ways(served: Served) -> None:
    served.generator.script = script(2)
    events = await served.events(*ASKED["chat, with usage"])
    assert events[-2]["usage"]["completion_tokens"] == sum(len(delta.token_ids) for delta in script(2))


# --- a lane by itself ----------------------------------------------------------------------------------


class Texts(dict[int, bytes]):
    """Made when they are asked for; every seventh token is no text."""

    def __missing__(self, token: int) -> bytes:
        text = self[token] = b"" if token % 7 == 0 else b"<%d>" % token
        return text


class Bench:
    """A lane with all it needs, and what it did: chunks, and what it gave to `take`."""

    def __init__(self, lane: Callable[..., TokenLane], most: int = 3) -> None:
        self.did: list[Any] = []
        self.keeps_up = True
        self.clock = 0.0
        self.lane = lane(self._now, self._write, b"[", b"]")
        self.lane.texts = Texts()
        self.lane.bind(self.take, most)

    def _now(self) -> float:
        self.clock += 1
        return self.clock

    def _write(self, chunk: bytes) -> bool:
        self.did.append(chunk)
        return self.keeps_up

    def take(self, raw: msgspec.Raw, passed: int) -> bool:
        self.did.append((bytes(raw), passed))
        return not self.keeps_up

    def give(self, delta: Delta | bytes) -> bool:
        return self.lane(msgspec.Raw(delta if isinstance(delta, bytes) else encode(delta)))


@pytest.fixture(params=LANES)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


def test_tokens_that_are_text_alone_become_one_chunk(bench: Bench) -> None:
    for n, tokens in enumerate([(1,), (300, 70_001, 2**31)], 1):
        assert bench.give(Delta(tokens))
        assert bench.lane.last_token_s == n
    assert bench.did == [b"[<1>]", b"[<300><70001><2147483648>]"]
    assert bench.lane.generated == [1, 300, 70_001, 2**31]
    assert (bench.lane.take_count(), bench.lane.take_count()) == (4, 0)


LONG = {
    "the end": Delta((1,), FinishReason.STOP),
    "tokens of the cache": Delta((1,), cached_tokens=0),
    "no text": Delta((1, 7)),
    "no token": Delta(),
    "an array of nothing": b"\x90",
    "a number": b"\x05",
    "a token below 0": b"\x91\x91\xff",
    "a token of 64 bits": b"\x91\x91\xcf" + bytes(8),
    "a longer form of a token": b"\x91\x91\xcc\x05",
    "a longer form of an array": b"\x91\xdc\x00\x01\x05",
    "arrays in arrays": b"\x91" * 5000,
    "too short": b"\x91\x92\x05",
    "more behind it": b"\x91\x91\x05\xc0",
    "too many": encode(Delta((1,) * (MOST_TOKENS + 1))),
    "other fields than are known": b"\x98\x91\x05" + b"\xc0" * 6 + b"\x01",
    "nothing": b"",
}


@pytest.mark.parametrize("name", LONG)
def test_all_else_goes_the_long_way_whole(bench: Bench, name: str) -> None:
    bench.give(Delta((1,)))
    assert not bench.give(LONG[name]), "what `take` says counts"
    raw = LONG[name]
    assert bench.did == [b"[<1>]", (raw if isinstance(raw, bytes) else encode(raw), 1)]
    assert bench.lane.generated == [1]
    assert bench.lane.take_count() == 1


def test_the_long_way_is_told_how_many_tokens_passed(bench: Bench) -> None:
    for _ in range(9):
        bench.give(Delta((1,)))
    one = encode(Delta((1,)))
    assert bench.did == [b"[<1>]"] * 3 + [(one, 3)] + [b"[<1>]"] * 3 + [(one, 3), b"[<1>]"]


def test_beyond_the_limit_a_message_goes_the_long_way(bench: Bench) -> None:
    bench.lane.limit = 4
    for tokens in ((1, 2, 3), (4, 5), (6,), (7,)):
        bench.give(Delta(tokens))
    assert bench.lane.generated == [1, 2, 3, 6]
    assert bench.did == [b"[<1><2><3>]", (encode(Delta((4, 5))), 1), b"[<6>]", (encode(Delta((7,))), 1)]


def test_without_texts_all_goes_the_long_way(bench: Bench) -> None:
    bench.lane.texts = None
    bench.give(Delta((1,)))
    assert bench.did == [(encode(Delta((1,))), 0)]


def test_it_tells_whether_the_client_keeps_up(bench: Bench) -> None:
    bench.keeps_up = False
    assert not bench.give(Delta((1,)))
    assert bench.did == [b"[<1>]"], "taken none the less"


def test_a_lane_that_is_bound_to_nothing_says_so(bench: Bench) -> None:
    bench.lane.release()
    with pytest.raises(RuntimeError, match="not bound"):
        bench.give(Delta((1,)))


def test_releasing_a_lane_during_a_lookup_does_not_crash(bench: Bench) -> None:
    class Letting(dict[int, bytes]):
        def __missing__(self, token: int) -> bytes:
            bench.lane.release()
            return b""

    bench.lane.texts = Letting()
    with pytest.raises((RuntimeError, TypeError)):
        bench.give(Delta((1,)))


def test_errors_come_through(bench: Bench) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    bench.lane.bind(broken, 3)
    with pytest.raises(ZeroDivisionError):
        bench.give(Delta((7,)))
    lane = type(bench.lane)(bench._now, broken, b"", b"")
    lane.texts = Texts()
    lane.bind(bench.take, 3)
    with pytest.raises(ZeroDivisionError):
        lane(msgspec.Raw(encode(Delta((1,)))))


def test_a_ring_of_references_is_found(bench: Bench) -> None:
    class Stream:
        def __init__(self, lane: TokenLane) -> None:
            self.lane = lane
            lane.bind(self.take, 3)

        def take(self, raw: msgspec.Raw, passed: int) -> bool:
            return False

    gone = weakref.ref(Stream(type(bench.lane)(bench._now, bench._write, b"", b"")))
    gc.collect()
    assert gone() is None


MESSAGES_RAW = st.one_of(
    st.binary(max_size=12),
    st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 200), max_size=300).map(lambda ids: encode(Delta(tuple(ids)))),
    st.tuples(st.lists(st.integers(0, 99)), st.lists(st.none() | st.integers(0, 3), max_size=7)).map(
        lambda parts: msgspec.msgpack.encode([parts[0], *parts[1]])
    ),
)


@pytest.mark.skipif(not NATIVE, reason=NOT_BUILT)
@given(raws=st.lists(MESSAGES_RAW, max_size=20), most=st.integers(0, 5), limit=st.integers(0, 400))
def test_the_native_lane_does_what_the_plain_one_does(raws: list[bytes], most: int, limit: int) -> None:
    plain, native = Bench(PlainTokenLane, most), Bench(TokenLane, most)
    plain.lane.limit = native.lane.limit = limit
    for raw in raws:
        shows = [bench.give(raw) for bench in (plain, native)]
        assert native.lane.generated == plain.lane.generated
        assert shows[0] == shows[1]
    assert native.did == plain.did
    assert native.lane.take_count() == plain.lane.take_count()
