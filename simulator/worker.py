"""Simulate one worker: the live scheduler and block pool, advanced lazily, step by step or run by run."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvmesh.kvcache.pool import BlockPool
from kvmesh.kvcache.tiers.whole import WholeCache
from kvmesh.protocol.events import KvEvent
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import Role, WorkerCard
from kvmesh.protocol.timing import Timing
from kvmesh.simulator.tiers import SimTiers
from kvmesh.workers.engines.mock.pace import MockPace
from kvmesh.workers.executor import Sampled
from kvmesh.workers.scheduler import DecodeRun, KvPull, Output, PeerLoad, Scheduler, SequenceState, Step, TierLoad
from kvmesh.workers.tiers import note_prompts

MOST_RUN_S = 2.0  # the world learns of blocks filled and taken in a long run of decode steps at least so often
_FOREVER = float("inf")
_TOKEN = Sampled(0)
_ZERO = (0,)


class SimWorkerState(Enum):
    STARTING = "starting"  # ordered, not there
    READY = "ready"
    DRAINING = "draining"  # takes no request any more
    TURNING = "turning"  # drained, on its way to another role
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Hold steps of a run that take equally long."""

    first: int
    begins_s: float
    step_s: float


class _RunInProgress:
    """Track a run of decode steps in progress. Its steps are computed for the next `MOST_RUN_S`."""

    def __init__(self, run: DecodeRun, now: float, step_s: Callable[[int, int], float]) -> None:
        """Plan a run. `step_s(sequences, blocks)` returns how long a step takes."""
        self.run = run
        self._stretches: list[_Stretch] = []
        self._starts: list[float] = []
        steps, ends, number, blocks = 0, now, 0, run.held_blocks
        growth = run.growth
        while steps < run.steps and ends - now < MOST_RUN_S:
            while number < len(growth) and growth[number] <= steps:
                number += 1
                blocks += 1
            until = growth[number] if number < len(growth) else run.steps
            each_s = step_s(len(run.sequences), blocks)
            if each_s > 0:
                until = min(until, steps + int((now + MOST_RUN_S - ends) / each_s) + 1)
            self._stretches.append(_Stretch(steps, ends, each_s))
            self._starts.append(ends)
            ends += (until - steps) * each_s
            steps = until
        self.steps = steps
        self.ends_s = ends

    def done_by(self, now: float) -> int:
        """Return how many steps have ended by then."""
        if now >= self.ends_s:
            return self.steps
        stretch = self._stretches[max(0, bisect_right(self._starts, now) - 1)]
        if stretch.step_s <= 0:
            return stretch.first
        return min(self.steps - 1, stretch.first + int((now - stretch.begins_s) / stretch.step_s))

    def ends_at(self, steps: int) -> float:
        """Return when `steps` steps have ended; steps < self.steps."""
        number = len(self._stretches) - 1
        while self._stretches[number].first > steps:
            number -= 1
        stretch = self._stretches[number]
        return stretch.begins_s + (steps - stretch.first) * stretch.step_s


class SimWorker:
    """Simulate a worker, which does nothing by itself: `wake` has to be called at `due_s`; `wakes` marks stale calls.

    It reports through `on_outputs(worker, outputs, when)` and `on_pull(worker, pull, when)`.
    """

    def __init__(
        self,
        card: WorkerCard,
        scheduler: Scheduler,
        timing: Timing,
        on_outputs: Callable[["SimWorker", Sequence[Output], float], None],
        on_pull: Callable[["SimWorker", KvPull, float], None],
        tiers: SimTiers | None = None,
    ) -> None:
        self.card = card
        self.tiers = tiers
        self.state = SimWorkerState.STARTING
        self.scheduler = scheduler
        self.ordered_s = 0.0
        self.assigned = 0  # requests that were placed here and have not ended
        self.turns_into: Role | None = None
        self.computed_tokens = 0  # of prompts
        self.busy_s = 0.0
        self.turns = 0
        self.wakes = 0  # how often its wake-up was set; the last one counts
        self.followed = 0  # of `wakes`, by the world
        self.due_s = _FOREVER
        self._on_outputs = on_outputs
        self._on_pull = on_pull
        self._cache = WholeCache(scheduler.pool) if tiers is None else tiers.cache
        self._step: Step | None = None
        self._step_began_s = 0.0
        self._run: _RunInProgress | None = None
        self.set_timing(timing)

    @property
    def worker_id(self) -> WorkerId:
        return self.card.worker_id

    @property
    def role(self) -> Role:
        return self.card.role

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.pool

    @property
    def is_idle(self) -> bool:
        return self._step is None and self._run is None

    def set_timing(self, timing: Timing) -> None:
        """Change the timing. Call it between steps only."""
        self._timing = timing
        self._pace = MockPace(timing, 0.0, _never, block_size=self.pool.block_size)

    def take_events(self) -> list[KvEvent]:
        return self._cache.take_events()

    def snapshot(self) -> list[KvEvent]:
        return self._cache.snapshot()

    def queue(self, sequence: SequenceState, now: float) -> None:
        """Queue a sequence. Raises InvalidRequestError if it can never run here."""
        stop = sequence.request.stop
        self.scheduler.check_size(len(sequence.prompt), len(sequence.output), stop.max_tokens)
        self.settle(now)
        self.scheduler.queue(sequence)
        self._move(self.scheduler.plan_moves(), now)
        self.stir(now)

    def pull_ended(self, pull: KvPull, now: float) -> None:
        """Take that a pull, or a load from host memory, is complete."""
        self.settle(now)
        if isinstance(pull, TierLoad):
            assert self.tiers is not None
            self.tiers.load_ended(pull)
            self.scheduler.load_ended(pull, len(pull.into))
        else:
            self.scheduler.pull_ended(pull.sequence, arrived=True)
        self.stir(now)

    def peer_load_ended(self, load: PeerLoad, arrived: int, took_s: float, now: float) -> None:
        """Take that the first `arrived` blocks of a pull from a peer have come."""
        assert self.scheduler.peers is not None
        self.settle(now)
        self.scheduler.peers.pull_ended(load.source.worker_id, len(load.into), arrived, took_s, now)
        self.scheduler.load_ended(load, arrived)
        self.stir(now)

    def release(self, blocks: Sequence[int], now: float) -> None:
        """Release blocks that were kept for a decode worker."""
        self.settle(now)
        self.pool.release(blocks)
        self.stir(now)

    def abort(self, request_id: RequestId, now: float) -> None:
        self.settle(now)
        self.scheduler.abort(request_id)
        self.stir(now)

    def stir(self, now: float) -> None:
        """Begin a step if there is one and none is in progress."""
        if self.is_idle:
            self._begin(now)

    def settle(self, now: float) -> None:
        """Bring a run up to `now`: the step in progress continues, later ones are planned again. Then `stir` it."""
        running = self._run
        if running is None:
            return
        self._run = None
        done = running.done_by(now)
        if done:
            self._complete_run(running.run, done)
        if done == running.steps:  # its end and this call came at once: the caller stirs it
            self.due_s = _FOREVER
            return
        begins_s = running.ends_at(done)
        self.busy_s -= running.ends_s - begins_s
        self._begin_step(begins_s, now)

    def wake(self) -> None:
        """End the step or the run, which is due now."""
        now = self.due_s
        self.due_s = _FOREVER
        if (running := self._run) is not None:
            self._run = None
            self._complete_run(running.run, running.steps)
            self._begin(now)
        elif (step := self._step) is not None:
            self._step = None
            note_prompts(self.scheduler, step.rows, now - self._step_began_s)
            results = [_TOKEN if row.sample else None for row in step.rows]
            self._on_outputs(self, self.scheduler.complete(step, results), now)
            if self.is_idle:  # what was heard of it may have begun the next one
                self._begin(now)

    def _advance_tiers(self, now: float) -> None:
        if self.tiers is not None:
            self.tiers.advance(now)

    def _begin(self, now: float) -> None:
        self._advance_tiers(now)
        run = self.scheduler.plan_run()
        if run is not None and run.steps > 1:
            self._run = _RunInProgress(run, now, self._decode_s)
            self.busy_s += self._run.ends_s - now
            self._wake_at(self._run.ends_s)
            return
        self._begin_step(now, now)

    def _begin_step(self, begins_s: float, now: float) -> None:
        """Begin the next step, which began a little ago if it was part of a run that was cut short."""
        step = self.scheduler.plan()
        self._move(step, now)
        if step.rows:
            took_s = self._pace.step_s(step.rows)
            self.computed_tokens += sum(
                [len(row.token_ids) for row in step.rows if len(row.token_ids) > 1 or not row.output]
            )
            self.busy_s += took_s
            self._step, self._step_began_s = step, begins_s
            self._wake_at(max(now, begins_s + took_s))

    def _move(self, step: Step, now: float) -> None:
        for pull in (*step.pulls, *step.loads):
            self._on_pull(self, pull, now)

    def _decode_s(self, sequences: int, blocks: int) -> float:
        return self._timing.decode_s(sequences, blocks * self.pool.block_size)

    def _complete_run(self, run: DecodeRun, steps: int) -> None:
        self.scheduler.complete_run(run, steps, _draw)

    def _wake_at(self, when: float) -> None:
        self.due_s = when
        self.wakes += 1


def _draw(_: SequenceState, count: int) -> tuple[int, ...]:
    return _ZERO * count


async def _never(_: float) -> None:
    raise AssertionError("simulated steps do not wait")
