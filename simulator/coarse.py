"""Simulate a fleet in a tenth of the time: prompts and answers as amounts of work, without blocks, hashes and steps.

The exact world (`simulator/world.py`) runs the live router and schedulers. This world keeps what sizes a fleet: prompts
that queue for a worker, answers that share a worker's steps, KV that is full, cold starts, drains, flips, the router's
queue and what it refuses, and the same planner with the same observations. docs/simulator.md compares the two.
"""

import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

from kvmesh.planner.model import RoleFleet, WorkerLoad
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import Role
from kvmesh.router.load import PROMPTS_WINDOW_S
from kvmesh.router.pressure import BusyShare
from kvmesh.simulator.agenda import Agenda
from kvmesh.simulator.coarse_router import CoarseRouter
from kvmesh.simulator.config import SimConfig, pull_s_per_token_of, timing_of
from kvmesh.simulator.hook import PlannerHook, PlannerLoop
from kvmesh.simulator.records import Records
from kvmesh.simulator.report import SimReport
from kvmesh.simulator.requests import SimRequest
from kvmesh.simulator.worker import SimWorkerState

_FOREVER = float("inf")
_READY = SimWorkerState.READY


@dataclass(slots=True, eq=False)
class CoarseRequest:
    """A request between its arrival and its end. `context_tokens` of KV are held on average while it is answered."""

    request: SimRequest
    arrival_s: float
    context_tokens: int
    request_id: RequestId
    placed_s: float = 0.0
    first_s: float = -1.0
    cached_tokens: int = 0
    predicted_tokens: int = 0


@dataclass(slots=True, eq=False)
class CoarseWorker:
    """A worker with a queue of prompts, and answers that all get one token in each step.

    `tokens` counts the tokens that an answer would have got that runs since the worker joined.
    """

    number: int
    role: Role
    ordered_s: float
    state: SimWorkerState = SimWorkerState.STARTING
    turns_into: Role | None = None
    assigned: int = 0
    free_s: float = 0.0  # when all its prompts are computed
    prompts: deque[tuple[float, int, float]] = field(default_factory=deque)  # when computed, tokens, seconds
    queued_tokens: int = 0
    with_prompts: BusyShare = field(default_factory=lambda: BusyShare(PROMPTS_WINDOW_S))
    at_s: float = 0.0  # until when the answers are advanced
    tokens: float = 0.0
    answers: list[tuple[float, int, CoarseRequest]] = field(
        default_factory=list
    )  # heap; first: its `tokens` at the end
    waiting: deque[CoarseRequest] = field(default_factory=deque)  # for KV, or until another answer ends
    waiting_tokens: int = 0  # of KV, that they will take
    kv_tokens: int = 0
    wakes: int = 0

    @property
    def requests(self) -> int:
        """The requests that it answers, or will when their prompts are computed."""
        return self.assigned if self.role is Role.PREFILL else len(self.answers) + len(self.waiting) + len(self.prompts)

    def left_tokens(self, now: float) -> float:
        """Return the prompt tokens that are not computed yet."""
        if not self.prompts:
            return 0.0
        ends_s, tokens, service_s = self.prompts[0]
        return self.queued_tokens - tokens * (1 - min(1.0, (ends_s - now) / service_s))

    def take_prompt(self, tokens: int, service_s: float, now: float) -> None:
        if not self.prompts:
            self.with_prompts.change(+1, now)
        self.free_s = max(now, self.free_s) + service_s
        self.prompts.append((self.free_s, tokens, service_s))
        self.queued_tokens += tokens

    def forget_computed(self, now: float) -> None:
        while self.prompts and self.prompts[0][0] <= now:
            ended_s, tokens, _ = self.prompts.popleft()
            self.queued_tokens -= tokens
            if not self.prompts:
                self.with_prompts.change(-1, ended_s)


class RecentBlocks:
    """The blocks that the caches of all prefill workers together hold, the least recently used first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, names: bytes, capacity: int) -> int:
        """Return how many leading blocks are held, and hold all of them from now on."""
        wanted = array("Q")
        wanted.frombytes(names)
        held, blocks = 0, self._blocks
        for place, name in enumerate(wanted):
            if name in blocks:
                blocks.move_to_end(name)
                held += held == place
            else:
                blocks[name] = None
        while len(blocks) > capacity:
            blocks.popitem(last=False)
        return held


class CoarseFleet:
    """Track role and state of each worker."""

    def __init__(self, config: SimConfig) -> None:
        self._config = config
        self._numbers = count()
        self.workers: list[CoarseWorker] = []  # without workers that are gone
        self.decoding_role = Role.AGGREGATED if config.mode == "aggregated" else Role.DECODE
        self.gpu_seconds = self.worker_seconds = 0.0  # of workers that are gone

    def order(self, role: Role, now: float) -> CoarseWorker:
        """Add a worker that starts."""
        worker = CoarseWorker(next(self._numbers), role, now)
        self.workers.append(worker)
        return worker

    def end(self, worker: CoarseWorker, now: float) -> None:
        self.worker_seconds += now - worker.ordered_s
        self.gpu_seconds += (now - worker.ordered_s) * self._gpus(worker)
        worker.state = SimWorkerState.GONE
        self.workers.remove(worker)

    def seconds_until(self, now: float) -> tuple[float, float]:
        """Return the worker seconds and the GPU seconds of all workers so far."""
        here = [(now - worker.ordered_s, self._gpus(worker)) for worker in self.workers]
        return (
            self.worker_seconds + sum(took_s for took_s, _ in here),
            self.gpu_seconds + sum(took_s * gpus for took_s, gpus in here),
        )

    def of(self, role: Role, state: SimWorkerState = _READY) -> list[CoarseWorker]:
        return [worker for worker in self.workers if worker.role is role and worker.state is state]

    def count(self, role: Role) -> RoleFleet:
        turning = sum(worker.state is SimWorkerState.TURNING and worker.turns_into is role for worker in self.workers)
        return RoleFleet(
            ready=len(self.of(role)),
            starting=len(self.of(role, SimWorkerState.STARTING)) + turning,
            draining=len(self.of(role, SimWorkerState.DRAINING)),
        )

    def least_loaded(self, role: Role) -> Iterator[CoarseWorker]:
        """Return the ready workers, least loaded first, the newest of equals first."""
        return iter(sorted(self.of(role), key=lambda worker: (worker.assigned, -worker.number)))

    def loads(self, role: Role, queued_in_router: int) -> tuple[WorkerLoad, ...]:
        """Return the loads of the ready workers. What waits in the router counts in equal shares for each of them."""
        ready = self.of(role)
        return tuple(
            WorkerLoad(
                name=f"w{worker.number:05d}",
                queued_tokens=worker.queued_tokens + queued_in_router // len(ready),
                running=len(worker.answers),
                waiting=len(worker.waiting) + len(worker.prompts),
                kv_tokens=worker.kv_tokens,
                total_kv_tokens=self._config.total_kv_tokens,
            )
            for worker in ready
        )

    def _gpus(self, worker: CoarseWorker) -> float:
        return self._config.gpus_per_prefill if worker.role is Role.PREFILL else self._config.gpus_per_decode


def simulate_coarsely(requests: Iterable[SimRequest], config: SimConfig, hook: PlannerHook | None = None) -> SimReport:
    """Serve `requests`, which come in order of arrival, until the last has ended."""
    return CoarseWorld(config, hook).run(requests)


class CoarseWorld:
    """The events of the coarse simulation."""

    def __init__(self, config: SimConfig, hook: PlannerHook | None) -> None:
        self._config = config
        self._hook = hook
        self._agenda = Agenda()
        self._fleet = CoarseFleet(config)
        self._records = Records(config)
        self._cache = RecentBlocks()
        self._router = CoarseRouter(config)
        self._waiting: dict[RequestId, CoarseRequest] = {}  # in the router
        self._numbers = count()
        self._open = 0
        self._placed = 0  # of these, on workers
        self._pull_s_per_token = pull_s_per_token_of(config)
        self._most_queued = config.saturation_tokens or 1 << 60
        prefill, decode = (timing_of(config, is_prefill=is_prefill) for is_prefill in (True, False))
        self._prefill_s = {Role.PREFILL: prefill.prefill_s, self._fleet.decoding_role: decode.prefill_s}
        self._step_s = lru_cache(4096)(lambda sequences, held: decode.decode_s(sequences, held * config.block_size))
        for number in range(config.workers):
            role = Role.PREFILL if number < config.num_prefill else self._fleet.decoding_role
            self._join(self._fleet.order(role, 0.0))

    def run(self, requests: Iterable[SimRequest]) -> SimReport:
        """Simulate the requests."""
        agenda, config = self._agenda, self._config
        agenda.at(config.sample_s, self._sample)
        if self._hook is not None:
            PlannerLoop(
                self._hook,
                agenda,
                self._fleet,
                self._records,
                unplaced_tokens=lambda: self._router.isl_tokens,
                bring_up_to_now=self._bring_up_to_now,
                order=self._order,
                leave=self._leave,
            )
        arrivals = iter(requests)
        arrival = next(arrivals, None)
        while arrival is not None or self._open:
            due_s = agenda.due_s
            if arrival is not None and arrival.arrival_s <= due_s:
                agenda.now = arrival.arrival_s
                self._submit(arrival)
                arrival = next(arrivals, None)
            else:
                agenda.now = due_s
                agenda.run_due()
        worker_s, gpu_s = self._fleet.seconds_until(agenda.now)
        return self._records.report(agenda.now, worker_s, gpu_s, ())

    # --- prompts ------------------------------------------------------------------------------------------

    def _submit(self, facts: SimRequest) -> None:
        half_a_block = self._config.block_size // 2  # the last block is half full on average
        context_tokens = facts.isl_tokens + facts.osl_tokens // 2 + half_a_block
        request = CoarseRequest(facts, facts.arrival_s, context_tokens, RequestId(str(next(self._numbers))))
        self._records.arrived(request)
        self._open += 1
        if not self._router and (worker := self._with_room()) is not None:
            self._compute(request, worker)
            return
        self._waiting[request.request_id] = request
        for refused in self._router.push(request.request_id, facts, self._agenda.now):
            self._records.failed(self._waiting.pop(refused))
            self._open -= 1
        self._dispatch()

    def _dispatch(self) -> None:
        """Place the requests that wait in the router while a worker has room for a prompt."""
        while (request_id := self._router.pop(self._agenda.now, lambda: self._with_room() is not None)) is not None:
            worker = self._with_room()
            assert worker is not None
            self._compute(self._waiting.pop(request_id), worker)

    def _with_room(self) -> CoarseWorker | None:
        """Return the worker for the next prompt; None if all that may compute it have enough to do."""
        decoding_role = self._fleet.decoding_role
        if self._placed >= len(self._fleet.of(decoding_role)) * self._config.max_num_seqs:
            return None
        prefill, decode = self._least_queued(Role.PREFILL), self._least_queued(decoding_role)
        if decode is None:
            return None
        now = self._agenda.now
        if prefill is not None and prefill.left_tokens(now) < self._most_queued:
            return prefill
        if decode.left_tokens(now) >= self._most_queued:
            return None
        if prefill is not None:
            had = decode.with_prompts.of(1, now)
            if decode.left_tokens(now) >= prefill.left_tokens(now) or self._router.spare_share(decode.requests) <= had:
                return None
        return decode

    def _least_queued(self, role: Role) -> CoarseWorker | None:
        """Return the ready worker with the shortest queue of prompts."""
        now, best = self._agenda.now, None
        for worker in self._fleet.workers:
            if worker.role is role and worker.state is _READY:
                worker.forget_computed(now)
                if (
                    best is None
                    or worker.free_s < best.free_s
                    or (worker.free_s <= now and worker.assigned < best.assigned)
                ):
                    best = worker
        return best

    def _compute(self, request: CoarseRequest, worker: CoarseWorker) -> None:
        now, facts = self._agenda.now, request.request
        caches = sum(other.role is worker.role and other.state is _READY for other in self._fleet.workers)
        held = self._cache.use(facts.names, caches * self._config.blocks)
        request.cached_tokens = request.predicted_tokens = min(held * self._config.block_size, facts.isl_tokens - 1)
        request.placed_s = now
        self._placed += 1
        worker.assigned += 1
        tokens = facts.isl_tokens - request.cached_tokens
        service_s = self._prompt_s(worker.role, tokens)
        ready = self._fleet.of(self._fleet.decoding_role)
        running = sum(each.requests for each in ready) // max(1, len(ready))
        self._router.placed(request.request_id, tokens, worker.queued_tokens, running, now)
        worker.take_prompt(tokens, service_s, now)
        if worker.role is not Role.PREFILL:  # the answers of this worker wait for the prompt
            self._advance(worker)
            worker.at_s += service_s
            self._plan_wake(worker)
        self._agenda.at(worker.free_s, self._computed, request, worker)

    def _prompt_s(self, role: Role, tokens: int) -> float:
        whole, rest = divmod(tokens, self._config.max_step_tokens)
        time_of = self._prefill_s[role]
        return whole * time_of(self._config.max_step_tokens) + (time_of(rest) if rest else 0.0)

    def _computed(self, request: CoarseRequest, worker: CoarseWorker) -> None:
        now = self._agenda.now
        request.first_s = now
        self._records.began(request, now + self._config.hop_s)
        self._router.began(request.request_id, now)
        worker.forget_computed(now)
        if worker.role is Role.PREFILL or worker.state is not _READY:
            pulled_s = request.request.isl_tokens * self._pull_s_per_token + 2 * self._config.hop_s
            self._agenda.at(now + pulled_s, self._answer, request, None)
            self._give_up(worker)
        else:
            self._answer(request, worker)
            worker.assigned -= 1
        self._dispatch()

    # --- answers ------------------------------------------------------------------------------------------

    def _answer(self, request: CoarseRequest, worker: CoarseWorker | None) -> None:
        ready = self._fleet.of(self._fleet.decoding_role)
        if worker is None and not ready:
            self._agenda.later(1.0, self._answer, request, None)
            return
        worker = worker or min(ready, key=lambda each: (each.kv_tokens + each.waiting_tokens, each.assigned))
        worker.assigned += 1
        self._advance(worker)
        worker.waiting.append(request)
        worker.waiting_tokens += request.context_tokens
        self._admit(worker)
        self._plan_wake(worker)

    def _admit(self, worker: CoarseWorker) -> None:
        config = self._config
        while worker.waiting and len(worker.answers) < config.max_num_seqs:
            request = worker.waiting[0]
            if worker.answers and worker.kv_tokens + request.context_tokens > config.total_kv_tokens:
                return
            worker.waiting.popleft()
            worker.waiting_tokens -= request.context_tokens
            worker.kv_tokens += request.context_tokens
            ends = worker.tokens + max(0, request.request.osl_tokens - 1)
            heapq.heappush(worker.answers, (ends, next(self._numbers), request))

    def _advance(self, worker: CoarseWorker) -> None:
        """Give all answers of a worker their tokens until now, and end those that have all."""
        now = self._agenda.now
        while worker.answers and worker.at_s <= now:
            step_s = self._step_of(worker)
            ends, _, request = worker.answers[0]
            end_s = worker.at_s + (ends - worker.tokens) * step_s
            if end_s > now + 1e-9:
                worker.tokens += (now - worker.at_s) / step_s if step_s > 0 else 0.0
                worker.at_s = now
                return
            heapq.heappop(worker.answers)
            worker.tokens, worker.at_s = max(worker.tokens, ends), max(worker.at_s, end_s)
            worker.kv_tokens -= request.context_tokens
            self._records.ended(request, end_s + self._config.hop_s)
            self._router.ended(request.request_id, request.request.osl_tokens, worker.requests, end_s)
            self._open -= 1
            self._placed -= 1
            worker.assigned -= 1
            self._admit(worker)
        worker.at_s = max(worker.at_s, now)

    def _step_of(self, worker: CoarseWorker) -> float:
        return self._step_s(len(worker.answers), worker.kv_tokens // self._config.block_size)

    def _plan_wake(self, worker: CoarseWorker) -> None:
        worker.wakes += 1
        if worker.answers:
            due_s = worker.at_s + (worker.answers[0][0] - worker.tokens) * self._step_of(worker)
            self._agenda.at(max(self._agenda.now, due_s), self._wake, worker, worker.wakes)

    def _wake(self, worker: CoarseWorker, number: int) -> None:
        if number == worker.wakes:
            self._bring_up_to_now(worker)
            self._check_drained(worker)
            self._dispatch()

    # --- the fleet ----------------------------------------------------------------------------------------

    def _bring_up_to_now(self, worker: CoarseWorker) -> None:
        worker.forget_computed(self._agenda.now)
        self._advance(worker)
        self._plan_wake(worker)

    def _sample(self) -> None:
        next_s = self._records.sample(self._agenda.now, self._fleet, len(self._router))
        self._agenda.at(next_s, self._sample)

    def _order(self, role: Role) -> None:
        worker = self._fleet.order(role, self._agenda.now)
        self._agenda.at(self._agenda.now + self._config.start_s, self._join, worker)

    def _join(self, worker: CoarseWorker) -> None:
        worker.state = _READY
        worker.at_s = worker.free_s = self._agenda.now
        self._dispatch()

    def _leave(self, worker: CoarseWorker, state: SimWorkerState) -> None:
        """Let a worker leave. It gets no more requests and finishes those it has."""
        worker.state = state
        self._check_drained(worker)

    def _give_up(self, worker: CoarseWorker) -> None:
        worker.assigned -= 1
        self._check_drained(worker)

    def _check_drained(self, worker: CoarseWorker) -> None:
        if worker.assigned or worker.state not in (SimWorkerState.DRAINING, SimWorkerState.TURNING):
            return
        if worker.state is SimWorkerState.TURNING:
            self._agenda.at(self._agenda.now + self._config.flip_s, self._turn, worker)
            return
        self._fleet.end(worker, self._agenda.now)

    def _turn(self, worker: CoarseWorker) -> None:
        if worker.turns_into is not None:
            worker.role, worker.turns_into = worker.turns_into, None
            self._join(worker)
