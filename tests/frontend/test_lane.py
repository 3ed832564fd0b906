"""Deltas that are text alone take a lane of their own: what the client gets is the same, byte for byte."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from frontend.answer import Answer
from frontend.endpoints import SseOutlet
from protocol.messages import Delta, Feature, FinishReason
from tests.frontend import tiny
from tests.frontend.serving import CHAT, END, TEXT, Served, ids, scored, serving

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


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A model that neither thinks nor calls tools."""
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


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[Delta]:
    """The deltas that do not take the lane."""
    seen: list[Delta] = []
    general = Answer.on_delta

    def on_delta(self: Answer, delta: Delta) -> Any:
        seen.append(delta)
        return general(self, delta)

    monkeypatch.setattr(Answer, "on_delta", on_delta)
    return seen


async def test_the_first_and_the_last_go_the_long_way_and_so_do_parts_of_characters(
    served: Served, long_way: list[Delta]
) -> None:
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
