"""Our own engine reports its blocks in time, and hands its tokens out in order."""

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.protocol.errors import ConfigError, EngineError
from kvmesh.protocol.events import KvEvent, Stored
from kvmesh.protocol.ids import RequestId, new_worker_id
from kvmesh.protocol.messages import Delta, GenerateRequest, StopConditions, pack_tokens
from kvmesh.workers import step_engine
from kvmesh.workers.engines.mock.executor import MockExecutor
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from tests.support.budget import examples

BLOCK, PROMPT, ANSWER = 4, 10, 30
REQUEST = GenerateRequest(
    request_id=RequestId("r"),
    model="m",
    prompt=pack_tokens(range(100, 100 + PROMPT)),
    stop=StopConditions(max_tokens=ANSWER, ignore_eos=True),
)


async def started() -> StepEngine:
    engine = StepEngine(
        MockExecutor(block_size=BLOCK, speedup=0), None, StepEngineConfig("m", "", 64, 8, 512, 30.0, 5.0)
    )
    await engine.start(new_worker_id("w"), "")
    return engine


async def turns_of_the_loop(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def told(monkeypatch: pytest.MonkeyPatch, every_s: float) -> list[tuple[int, int]]:
    """Return (tokens of the answer that had come, blocks stored) for each report of blocks."""
    monkeypatch.setattr(step_engine, "EVENTS_EVERY_S", every_s)
    engine = await started()
    deltas: list[Delta] = []
    seen: list[tuple[int, int]] = []

    def listen(events: Sequence[KvEvent]) -> None:
        blocks = sum(len(event.hashes) for event in events if isinstance(event, Stored))
        seen.append((sum(len(delta.token_ids) for delta in deltas), blocks))

    engine.on_kv_events(listen)
    async for delta in engine.generate(REQUEST):
        deltas.append(delta)  # noqa: PERF401 - the listener looks at it meanwhile
    await turns_of_the_loop(3)
    await engine.stop()
    return seen


async def test_blocks_are_reported_after_the_first_and_last_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt, rest = await told(monkeypatch, every_s=1e9)
    assert prompt == (1, PROMPT // BLOCK)
    assert rest == (ANSWER, (PROMPT + ANSWER - 1) // BLOCK - PROMPT // BLOCK)


async def test_a_running_answers_blocks_are_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = await told(monkeypatch, every_s=0)
    assert [blocks for _, blocks in seen] == [PROMPT // BLOCK] + [1] * (
        (PROMPT + ANSWER - 1) // BLOCK - PROMPT // BLOCK
    )


async def test_prompts_longer_than_a_step_are_reported_until_they_are_computed() -> None:
    engine = await started()
    engine._scheduler._limits = dataclasses.replace(engine._scheduler._limits, max_step_tokens=3)
    seen: list[int] = []
    engine.on_load_change(lambda: seen.append(engine.report().queued_tokens))
    async for _ in engine.generate(REQUEST):
        pass
    await engine.stop()
    assert seen == [4, 1, 0, 0], "after each step of 3 tokens, and at the end"


def tokens(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@settings(max_examples=examples(20))
@given(answers=st.lists(st.booleans(), max_size=ANSWER), turns=st.lists(st.integers(0, 3), max_size=ANSWER))
async def test_pushed_and_pulled_deltas_are_the_answer_in_order(answers: list[bool], turns: list[int]) -> None:
    """The list `answers` says whether each offer is taken; `turns` is how long the consumer works on each delta."""
    engine = await started()
    expected = tokens([delta async for delta in engine.generate(REQUEST)])
    got: list[Delta] = []
    is_busy = False
    will_take, busy_for = iter(answers), iter(turns)

    def take(delta: Delta) -> bool:
        assert not is_busy, "it might overtake the one before"
        assert delta.finish_reason is None
        taken = next(will_take, True)
        if taken:
            got.append(delta)
        return taken

    async for delta in engine.push(REQUEST, take):
        is_busy = True
        await turns_of_the_loop(next(busy_for, 0))
        got.append(delta)
        is_busy = False
    await engine.stop()
    assert tokens(got) == expected
    assert got[-1].finish_reason is not None


async def test_a_pushed_answer_wakes_its_consumer_once() -> None:
    engine = await started()
    pushed: list[Delta] = []

    def take(delta: Delta) -> bool:
        pushed.append(delta)
        return True

    pulled = [delta async for delta in engine.push(REQUEST, take)]
    await engine.stop()
    assert (len(tokens(pushed)), len(pulled)) == (ANSWER - 1, 1)


async def test_an_engine_that_cannot_tell_its_blocks_is_not_well() -> None:
    engine = await started()

    def listen(events: Sequence[KvEvent]) -> None:
        raise OSError("no socket")

    engine.on_kv_events(listen)
    with suppress(EngineError):
        _ = [delta async for delta in engine.generate(REQUEST)]
    await turns_of_the_loop(3)
    with pytest.raises(EngineError, match="cannot tell its KV events: OSError: no socket"):
        engine.check_health()
    await engine.stop()


async def test_a_kv_cache_larger_than_memory_is_a_bad_setting() -> None:
    config = StepEngineConfig("m", "", 10**15, 8, 512, 30.0, 5.0)
    engine = StepEngine(MockExecutor(block_size=16, speedup=0), None, config)
    with pytest.raises(ConfigError, match=r"no memory for 1000000000000000 KV blocks.*--num-blocks"):
        await engine.start(new_worker_id("w"), "")
    await engine.stop()
