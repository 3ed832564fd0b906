"""When the engine of our own tells which blocks it holds."""

from collections.abc import Sequence

import pytest

from protocol.events import KvEvent, Stored
from protocol.ids import RequestId, new_worker_id
from protocol.messages import Delta, GenerateRequest, StopConditions, pack_tokens
from workers import step_engine
from workers.mock_engine.executor import MockExecutor
from workers.step_engine import StepEngine, StepEngineConfig

BLOCK, PROMPT, ANSWER = 4, 10, 30


async def told(monkeypatch: pytest.MonkeyPatch, every_s: float) -> list[tuple[int, int]]:
    """(tokens of the answer that had come, blocks stored) of each time it told of blocks."""
    monkeypatch.setattr(step_engine, "EVENTS_EVERY_S", every_s)
    engine = StepEngine(
        MockExecutor(block_size=BLOCK, speedup=0), None, StepEngineConfig("m", "", 64, 8, 512, 30.0, 5.0)
    )
    await engine.start(new_worker_id("w"), "")
    deltas: list[Delta] = []
    seen: list[tuple[int, int]] = []

    def listen(events: Sequence[KvEvent]) -> None:
        blocks = sum(len(event.hashes) for event in events if isinstance(event, Stored))
        seen.append((sum(len(delta.token_ids) for delta in deltas), blocks))

    engine.on_kv_events(listen)
    request = GenerateRequest(
        request_id=RequestId("r"),
        model="m",
        prompt=pack_tokens(range(100, 100 + PROMPT)),
        stop=StopConditions(max_tokens=ANSWER, ignore_eos=True),
    )
    async for delta in engine.generate(request):
        deltas.append(delta)  # noqa: PERF401 - the listener looks at it meanwhile
    await engine.stop()
    return seen


async def test_the_prompts_blocks_are_told_at_once_and_the_answers_with_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt, rest = await told(monkeypatch, every_s=1e9)
    assert prompt == (0, PROMPT // BLOCK), "before its first token has come"
    assert rest == (ANSWER - 1, (PROMPT + ANSWER - 1) // BLOCK - PROMPT // BLOCK), "before its last one has"


async def test_while_an_answer_goes_on_its_blocks_are_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = await told(monkeypatch, every_s=0)
    assert [blocks for _, blocks in seen] == [PROMPT // BLOCK] + [1] * (
        (PROMPT + ANSWER - 1) // BLOCK - PROMPT // BLOCK
    )
