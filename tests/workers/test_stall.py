"""An engine that makes no progress is found; a slow one, an idle one and a paused process are not."""

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from contextlib import suppress

import pytest

from kvmesh.protocol.errors import EngineError, UnreachableError
from kvmesh.workers import step_engine
from kvmesh.workers.engines.mock.executor import MockExecutor
from kvmesh.workers.executor import ModelInfo, Result, Row
from kvmesh.workers.stall import HESITATES_S, MOST_GAP_S, TIMES_LONGER, AnswerWatch, StepWatch
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from tests.support.asking import asked, prompt_tokens
from tests.support.patience import PATIENCE_S
from tests.support.recovery import RECOVERED_S, WITHOUT_S


def found_at_s(watch: StepWatch, until_s: int = 1000) -> int | None:
    """Return the second in which the running step is found to hang, looking once a second."""
    return next((second for second in range(until_s) if watch.hangs(second)), None)


def test_a_step_that_does_not_end_is_found_after_the_limit() -> None:
    watch = StepWatch(10.0)
    watch.begin(8, 0.0)
    assert found_at_s(watch) == 11
    assert watch.hangs(12.0) == "a step of 8 tokens has not ended for 12 s"


def test_an_idle_engine_does_not_hang() -> None:
    watch = StepWatch(10.0)
    watch.begin(8, 0.0)
    watch.end(0.1)
    assert found_at_s(watch) is None


def test_a_limit_of_zero_finds_nothing() -> None:
    watch = StepWatch(0.0)
    watch.begin(8, 0.0)
    assert found_at_s(watch) is None


@pytest.mark.parametrize(("before", "tokens"), [((8, 30.0), 8), ((16, 1.0), 480)], ids=["long step", "more tokens"])
def test_a_slow_machine_gets_four_times_what_its_steps_so_far_took(before: tuple[int, float], tokens: int) -> None:
    watch = StepWatch(10.0)
    watch.begin(before[0], 0.0)
    watch.end(before[1])
    assert watch.limit_s(tokens) == TIMES_LONGER * 30.0


def test_a_late_step_hesitates_before_it_hangs() -> None:
    watch = StepWatch(10.0)
    watch.begin(8, 0.0)
    late = [second for second in range(1, 6) if not watch.hangs(second) and watch.hesitates()]
    assert late == [second for second in range(1, 6) if second > HESITATES_S]
    watch.end(6.0)
    assert not watch.hesitates()


def test_a_slow_machine_does_not_hesitate() -> None:
    watch = StepWatch(10.0)
    watch.begin(8, 0.0)
    watch.end(1.0)
    watch.begin(8, 1.0)
    assert not watch.hangs(2.0) and not watch.hangs(4.0) and not watch.hesitates()


def test_a_process_that_was_stopped_does_not_blame_its_engine() -> None:
    watch = StepWatch(10.0)
    watch.begin(8, 0.0)
    assert not watch.hangs(1.0)
    assert not watch.hangs(3601.0), f"an hour without looks counts as {MOST_GAP_S} s"


def test_requests_without_any_token_are_found_after_the_limit() -> None:
    watch = AnswerWatch(120.0)
    found = next(second for second in range(1000) if watch.hangs(3, second))
    assert found == 121
    assert watch.hangs(3, 122.0) == "none of 3 requests has had a token for 122 s"


def test_one_answer_that_advances_is_progress_for_all() -> None:
    watch = AnswerWatch(120.0)
    for second in range(1000):
        if second % 100 == 0:
            watch.note()
        assert not watch.hangs(3, second)


def test_time_without_requests_does_not_count() -> None:
    watch = AnswerWatch(120.0)
    assert not any(watch.hangs(second % 100 and 3, second) for second in range(1000))


class StuckExecutor(MockExecutor):
    """Its warm-up works; a later step never ends, unless the test lets it."""

    def __init__(self) -> None:
        super().__init__(block_size=16, speedup=0)
        self.steps, self.may_go_on = 0, threading.Event()

    def load(self) -> ModelInfo:
        return dataclasses.replace(super().load(), pace=None)  # else its steps would run on the event loop

    def execute(self, rows: Sequence[Row]) -> list[Result]:
        self.steps += 1
        if self.steps > 2:
            self.may_go_on.wait(PATIENCE_S)
        return super().execute(rows)


async def test_a_stuck_engine_fails_its_streams_and_stops_without_waiting() -> None:
    executor = StuckExecutor()
    config = StepEngineConfig("m", "", 64, 8, 512, 30.0, 5.0, stall_timeout_s=0.05)
    engine = StepEngine(executor, None, config)
    await engine.start("w", "")
    answer = asyncio.ensure_future(anext(engine.generate(asked(prompt_tokens(40), model="m"))))
    try:
        with pytest.raises(EngineError, match="hangs: a step of 40 tokens"):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    engine.check_health()
                    await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="hangs"):
            await answer
        await asyncio.wait_for(engine.stop(), RECOVERED_S)
    finally:
        executor.may_go_on.set()


class SlowLoad(MockExecutor):
    """Loads its model until the test lets it go on, as a large model does."""

    def __init__(self) -> None:
        super().__init__(block_size=16, speedup=0)
        self.has_begun, self.may_go_on, self.is_closed = threading.Event(), threading.Event(), False

    def load(self) -> ModelInfo:
        self.has_begun.set()
        self.may_go_on.wait(WITHOUT_S)
        return super().load()

    def close(self) -> None:
        self.is_closed = True


async def test_a_load_that_was_given_up_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_engine, "LOAD_END_S", 0.05)
    executor = SlowLoad()
    engine = StepEngine(executor, None, StepEngineConfig("m", "", 64, 8, 512, 30.0, 5.0))
    starting = asyncio.create_task(engine.start("w", ""))
    try:
        await asyncio.to_thread(executor.has_begun.wait)
        starting.cancel()
        await asyncio.wait([starting])
        await asyncio.wait_for(engine.stop(), RECOVERED_S)
        assert not executor.is_closed, "its thread still uses it"
    finally:
        executor.may_go_on.set()


async def test_answers_of_a_late_step_go_elsewhere() -> None:
    executor = StuckExecutor()
    config = StepEngineConfig("m", "", 64, 8, 512, 30.0, 5.0, stall_timeout_s=60.0)
    engine = StepEngine(executor, None, config)
    await engine.start("w", "")
    answer = asyncio.ensure_future(anext(engine.generate(asked(prompt_tokens(40), model="m"))))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not answer.done():
                engine.check_health()
                await asyncio.sleep(0.05)
        with pytest.raises(UnreachableError, match="makes no step"):
            await answer
        with pytest.raises(UnreachableError, match="makes no step"):
            await anext(engine.generate(asked(prompt_tokens(20), model="m", request_id="late")))
        executor.may_go_on.set()
        delta = None
        async with asyncio.timeout(PATIENCE_S):
            while delta is None:
                with suppress(UnreachableError):  # until the step has ended
                    delta = await anext(engine.generate(asked(prompt_tokens(20), model="m")))
                await asyncio.sleep(0.01)
        assert delta.token_ids
    finally:
        executor.may_go_on.set()
        await engine.stop()
