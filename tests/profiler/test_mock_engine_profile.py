"""The mock engine itself, on a clock that jumps: its profile is the model that it keeps to."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.profiler.grid import DecodePoint, Point, PrefillPoint
from kvmesh.profiler.inprocess import MeasuredEngine
from kvmesh.profiler.measure import MeasurePlan, measure, work_of
from kvmesh.protocol.timing import PolynomialTiming
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.mock import executor
from kvmesh.workers.engines.mock.pace import MockPace
from kvmesh.workers.engines.opening import open_engine

BLOCK, BLOCKS, SEQUENCES = 16, 512, 16
TURNS = 60  # of the event loop, in which everybody takes what the last step gave


class JumpingClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    async def wait_until(self, due_s: float) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self.now_s = due_s


@pytest.fixture
async def points(monkeypatch: pytest.MonkeyPatch) -> Sequence[Point]:
    clock = JumpingClock()

    def pace(timing: Any, itl_ms: float, wait_until: object, **more: Any) -> MockPace:
        return MockPace(timing, itl_ms, clock.wait_until, **(more | {"clock": clock}))

    monkeypatch.setattr(executor, "MockPace", pace)
    worker = WorkerConfig(
        engine="mock",
        model_path=str(CHECKPOINT_DIR),
        block_size=BLOCK,
        num_blocks=BLOCKS,
        max_num_seqs=SEQUENCES,
        max_step_tokens=BLOCK * BLOCKS,
        kv_transfer="shm",
    )
    target = MeasuredEngine(open_engine(worker), clock)
    plan = MeasurePlan(prefill_points=6, context_points=3, batch_points=3, repeats=2, steps=16, warm_steps=4)
    found: list[Point] = []
    try:
        limits = await target.limits()
        await measure(target, plan, work_of(plan, limits), limits, "run", lambda point, _: found.append(point))
    finally:
        await target.close()
    return found


async def test_the_profile_of_the_mock_engine_is_its_model(points: Sequence[Point]) -> None:
    """Exact for prompts. A step is timed by whole blocks: on average half a block a sequence more than its tokens."""
    timing = PolynomialTiming(BLOCK * BLOCKS)
    prefilled = [point for point in points if isinstance(point, PrefillPoint)]
    decoded = [point for point in points if isinstance(point, DecodePoint)]
    assert len(prefilled) == 6
    assert len(decoded) >= 6
    for prompt in prefilled:
        assert prompt.ttft_s == pytest.approx(timing.prefill_s(prompt.isl_tokens), rel=1e-9)
        assert prompt.spread == pytest.approx(0, abs=1e-9)
    for step in decoded:
        fewest, most = int(step.kv_tokens), int(step.kv_tokens + BLOCK * step.batch)
        assert timing.decode_s(1, fewest) * 0.999 <= step.itl_s <= timing.decode_s(1, most) * 1.001
