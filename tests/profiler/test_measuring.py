"""Measuring a worker whose times are known gives these times back."""

import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.profiler.grid import DecodeCell, DecodePoint, Point, PrefillPoint, WorkerLimits, decode_table, prefill_table
from kvmesh.profiler.measure import (
    MeasurePlan,
    Timeline,
    Work,
    measure,
    repeated,
    spread_of,
    window_of,
    work_left,
    work_of,
)
from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.profile import Profile
from kvmesh.protocol.timing import PolynomialTiming
from tests.support.paced_target import PacedTarget

LIMITS = WorkerLimits(context_tokens=4096, total_kv_tokens=65_536, max_num_seqs=32)
PLAN = MeasurePlan(prefill_points=8, context_points=3, batch_points=3, repeats=2, steps=16, warm_steps=4)


class LinearTiming:
    """Exact in tables, which are linear too."""

    def prefill_s(self, new_tokens: int) -> float:
        return 0.01 + 0.0001 * new_tokens

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        return 0.002 + 0.0005 * sequences + 1e-7 * kv_tokens


async def points_of(target: PacedTarget, plan: MeasurePlan = PLAN, limits: WorkerLimits = LIMITS) -> list[Point]:
    points: list[Point] = []
    await measure(target, plan, work_of(plan, limits), limits, "run", lambda point, _: points.append(point))
    return points


def profile_of(points: Sequence[Point]) -> Profile:
    return Profile(
        model="m",
        engine="paced",
        device="none",
        prefill=prefill_table(point for point in points if isinstance(point, PrefillPoint)),
        decode=decode_table(point for point in points if isinstance(point, DecodePoint)),
        total_kv_tokens=LIMITS.total_kv_tokens,
    )


async def test_prompt_times_are_exact() -> None:
    timing = PolynomialTiming(LIMITS.total_kv_tokens)
    for point in await points_of(PacedTarget(timing, LIMITS)):
        if isinstance(point, PrefillPoint):
            assert point.ttft_s == pytest.approx(timing.prefill_s(point.isl_tokens), rel=1e-9)


async def test_step_times_are_exact_where_they_are_linear() -> None:
    timing = LinearTiming()
    decoded = [p for p in await points_of(PacedTarget(timing, LIMITS)) if isinstance(p, DecodePoint)]
    assert decoded
    for point in decoded:
        assert point.itl_s == pytest.approx(0.002 + 0.0005 * point.batch + 1e-7 * point.kv_tokens, rel=1e-9)
        assert point.kv_tokens == pytest.approx(point.batch * point.context_tokens, abs=2 * point.batch)


@pytest.mark.parametrize("caches", [True, False])
async def test_a_profile_is_within_four_percent_between_points(caches: bool) -> None:
    """The fit is a parabola over the KV usage, the table straight between its points."""
    timing = PolynomialTiming(LIMITS.total_kv_tokens)
    plan = MeasurePlan(prefill_points=16, context_points=5, batch_points=12, repeats=1)
    profile = profile_of(await points_of(PacedTarget(timing, LIMITS, caches=caches), plan))
    chance = random.Random(1)
    errors = []
    for _ in range(300):
        isl = chance.randint(16, 4094)
        errors.append(abs(profile.prefill_s(isl) / timing.prefill_s(isl) - 1))
        context = chance.randint(100, 3900)
        batch = chance.randint(1, min(32, int(0.9 * 65_536) // context))
        modelled_s = timing.decode_s(batch, batch * context)
        errors.append(abs(profile.decode_s(batch * context, context) / modelled_s - 1))
    assert statistics.mean(errors) < 0.005
    assert max(errors) < 0.04


async def test_sequences_are_measured_only_while_all_decode() -> None:
    """There is no prefix cache, so the first sequence is far ahead when the last one begins."""
    point = (await decode_points(PacedTarget(LinearTiming(), LIMITS, caches=False), DecodeCell(1000, 32)))[0]
    assert point.itl_s == pytest.approx(0.002 + 0.0005 * 32 + 1e-7 * point.kv_tokens, rel=1e-3)


async def test_a_worker_without_room_says_what_to_change() -> None:
    small = WorkerLimits(context_tokens=60, total_kv_tokens=65_536, max_num_seqs=32)
    with pytest.raises(EngineError, match=r"32 sequences of 59 tokens did not decode 16 steps together.*--steps"):
        await decode_points(PacedTarget(LinearTiming(), small, caches=False), DecodeCell(59, 32), small)


async def decode_points(target: PacedTarget, cell: DecodeCell, limits: WorkerLimits = LIMITS) -> list[DecodePoint]:
    points: list[Point] = []
    work = Work(prefill=[], decode=[cell])
    await measure(target, PLAN, work, limits, "run", lambda point, _: points.append(point))
    return [point for point in points if isinstance(point, DecodePoint)]


async def test_a_wave_takes_as_long_as_its_slowest_prompt() -> None:
    timing = LinearTiming()
    plan = MeasurePlan(prefill_points=3, context_points=0, wave=4, repeats=1)
    for ranks, prompts_one_after_the_other in ((4, 1), (1, 4)):
        for point in await points_of(PacedTarget(timing, LIMITS, ranks=ranks), plan):
            assert isinstance(point, PrefillPoint)
            expected = prompts_one_after_the_other * timing.prefill_s(point.isl_tokens)
            assert point.ttft_s == pytest.approx(expected)


async def test_no_prompt_is_found_in_a_cache() -> None:
    target = PacedTarget(LinearTiming(), LIMITS)
    plan = MeasurePlan(prefill_points=4, context_points=0, repeats=3)
    for salt in ("first", "second"):
        points: list[Point] = []
        await measure(
            target, plan, work_of(plan, LIMITS), LIMITS, salt, lambda point, _, into=points: into.append(point)
        )
        assert [point.spread for point in points] == pytest.approx([0, 0, 0, 0], abs=1e-9)


async def test_measured_points_are_not_measured_again() -> None:
    points = await points_of(PacedTarget(LinearTiming(), LIMITS))
    work = work_of(PLAN, LIMITS)
    left = work_left(work, points[:5])
    assert len(left.prefill) + len(left.decode) == len(points) - 5
    assert left.tokens < work.tokens
    assert work_left(work, points) == Work(prefill=[], decode=[])


async def test_noisy_results_are_measured_twice_as_often() -> None:
    results = iter([1.0, 1.1, 5.0, 1.0, 1.0, 1.0])

    async def once() -> float:
        return next(results)

    assert await repeated(once, 3, float) == [1.0, 1.1, 5.0, 1.0, 1.0, 1.0]


def test_the_spread_is_relative_to_the_median() -> None:
    assert spread_of([2.0, 1.0, 3.0]) == 1.0
    assert spread_of([0.0]) == 0.0


@given(st.integers(1, 8), st.integers(1, 20), st.floats(1e-3, 1.0), st.floats(0, 5))
def test_the_window_begins_when_all_sequences_decode(per_read: int, steps: int, itl_s: float, late_s: float) -> None:
    """Servers may tell several tokens at once."""

    def timeline(start_s: float, reads: int) -> Timeline:
        at_s = [start_s + itl_s * per_read * n for n in range(reads)]
        return Timeline(sent_s=0, at_s=at_s, tokens=[per_read * (n + 1) for n in range(reads)], prompt_tokens=10)

    reads = 60 + int(late_s / (itl_s * per_read))
    window = window_of([timeline(0.0, reads), timeline(late_s, reads)], 4, steps)
    assert window is not None
    assert window.itl_s == pytest.approx(itl_s)
    assert window_of([timeline(0.0, 3), timeline(1e6, 60)], 4, steps) is None
