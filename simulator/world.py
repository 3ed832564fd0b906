"""Discrete events: arrivals, ends of steps, pulls, news with a lag, and a planner that looks on."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count

from planner.model import Observation, ScalingDecision
from protocol.errors import ConfigError, MeshError
from protocol.events import KvEvent
from protocol.hashing import unpack_hashes
from protocol.ids import RequestId
from protocol.messages import GenerateRequest, Placed, Role, RouteRequest, StopConditions, Ticket
from router.core import Outcome, RouterState
from router.index import Holder
from router.load import Share
from router.rules import RouterRules, Saturation
from simulator.config import SimConfig, pull_s_per_token_of
from simulator.fleet import MODEL, TRANSFER, SimFleet
from simulator.hook import PlannerHook
from simulator.open_request import OpenRequest
from simulator.records import Records
from simulator.report import SimReport
from simulator.requests import SimRequest
from simulator.sequence import as_told, prompt_hashes, sequence_for
from simulator.worker import SimWorker, SimWorkerState
from workers.scheduler import Output, Pull, SequenceState

PROGRESS_S = 2.0  # as frontends tell the router of answers that grow
STILL_WAITING_S = 1.0  # as the router looks again at who waits
PATIENCE_S = 6 * 3600.0  # nothing ended for so long: what is left never will
_SETTLED_S = -1e6  # when the first workers joined
_FOREVER = float("inf")


def simulate(
    requests: Iterable[SimRequest],
    config: SimConfig,
    hook: PlannerHook | None = None,
    on_end: Callable[[], object] = bool,
) -> SimReport:
    """Serve `requests`, which come in order of arrival, until the last has ended. `on_end` is called at each end.

    Raises ConfigError for requests that were made for another block size, or out of order.
    """
    return World(config, hook, on_end).run(requests)


class World:
    def __init__(self, config: SimConfig, hook: PlannerHook | None, on_end: Callable[[], object]) -> None:
        self._config = config
        self._hook = hook
        self._on_end = on_end
        limits = Saturation(queued_tokens=config.saturation_tokens) if config.saturation_tokens else None
        rules = RouterRules(policy=config.policy, saturation=limits, recompute_price=config.recompute_price)
        self._routers = [RouterState(rules, seed=config.seed + number) for number in range(config.routers)]
        self._touched = [False] * config.routers  # who waits may go now
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()
        self._now = 0.0
        self._open: dict[RequestId, OpenRequest] = {}
        self._unplaced_tokens = 0
        self._is_watching_queue = False
        self._is_alone = False  # the request that is submitted: nothing else is to be placed at this instant
        self._pull_s_per_token = pull_s_per_token_of(config)
        self._fleet = SimFleet(config, self._take_outputs, self._begin_pull)
        self._records = Records(config)
        self._arrivals: Iterator[OpenRequest] = iter(())
        self._last_end_s = 0.0
        for number in range(config.workers):
            role = Role.PREFILL if number < config.num_prefill else self._fleet.decoding_role
            self._join(self._fleet.order(role, 0.0), _SETTLED_S)

    def run(self, requests: Iterable[SimRequest]) -> SimReport:
        """Requests that arrive at the same instant are in the queue together before any of them is placed."""
        self._arrivals = self._read(requests)
        self._begin_watching()
        if self._config.concurrency:
            for arrival in self._take_next(self._config.concurrency):
                self._submit(arrival)
            self._dispatch()
            self._work(iter(()))
        else:
            self._work(self._arrivals)
        worker_s, gpu_s = self._fleet.seconds_until(self._now)
        return self._records.report(self._now, worker_s, gpu_s, self._fleet.workers)

    # --- time -------------------------------------------------------------------------------------------

    def _work(self, arrivals: Iterator[OpenRequest]) -> None:
        agenda = self._agenda
        arrival = next(arrivals, None)
        while arrival is not None or self._open:
            due_s = agenda[0][0] if agenda else _FOREVER
            self._now = now = due_s if arrival is None or due_s < arrival.arrival_s else arrival.arrival_s
            if self._is_stuck(arrival):
                break
            while agenda and agenda[0][0] <= now:
                _, _, action, arguments = heapq.heappop(agenda)
                action(*arguments)
            if arrival is not None and arrival.arrival_s <= now:
                first, arrival = arrival, next(arrivals, None)
                self._is_alone = (arrival is None or arrival.arrival_s > now) and True not in self._touched
                self._submit(first)
                self._is_alone = False
            while arrival is not None and arrival.arrival_s <= now:
                self._submit(arrival)
                arrival = next(arrivals, None)
            if True in self._touched:
                self._dispatch()

    def _is_stuck(self, arrival: OpenRequest | None) -> bool:
        """Nothing ends any more: who is left has failed."""
        if arrival is not None or self._now - self._last_end_s < PATIENCE_S:
            return False
        self._now = self._last_end_s
        for request in list(self._open.values()):
            self._fail(request)
        return True

    def _at(self, when: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._agenda, (when, next(self._numbers), action, arguments))

    def _later(self, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        if delay_s > 0:
            self._at(self._now + delay_s, action, *arguments)
        else:
            action(*arguments)

    # --- requests ----------------------------------------------------------------------------------------

    def _read(self, requests: Iterable[SimRequest]) -> Iterator[OpenRequest]:
        block_size, last_s = self._config.block_size, 0.0
        for number, request in enumerate(requests):
            if len(request.names) != request.isl_tokens // block_size * 8:
                found = f"a prompt of {request.isl_tokens} tokens has {len(request.names) // 8} names of blocks"
                raise ConfigError(f"{found}, with blocks of {block_size} tokens it has another number of them")
            if request.arrival_s < last_s and not self._config.concurrency:
                raise ConfigError(f"request {number} arrives at {request.arrival_s} s, the one before at {last_s} s")
            last_s = request.arrival_s
            route = RouteRequest(
                request_id=RequestId(str(number)),
                model=MODEL,
                isl_tokens=request.isl_tokens,
                sequence_hashes=prompt_hashes(request.names),
                tenant=request.tenant,
            )
            yield OpenRequest(request, route, number % len(self._routers), request.arrival_s)

    def _take_next(self, most: int) -> Iterator[OpenRequest]:
        """In a closed loop requests arrive when others end."""
        for _ in range(most):
            if (request := next(self._arrivals, None)) is None:
                return
            request.arrival_s = self._now
            yield request

    def _submit(self, request: OpenRequest) -> None:
        self._open[request.route.request_id] = request
        self._unplaced_tokens += request.request.isl_tokens
        self._records.arrived(request)
        self._later(self._config.hop_s, self._route, request)

    def _route(self, request: OpenRequest) -> None:
        router = self._routers[request.router]
        try:
            if self._is_alone and (placed := router.try_place(request.route, self._now)) is not None:
                self._place(Outcome(request.route.request_id, placed))
                self._gossip(request.router)
                return
            self._touched[request.router] = True
            displaced = router.submit(request.route, self._now)
        except MeshError:
            self._fail(request)
            return
        for outcome in displaced:
            self._fail(self._open[outcome.request_id])

    def _dispatch(self) -> None:
        for number, router in enumerate(self._routers):
            if not self._touched[number]:
                continue
            self._touched[number] = False
            if not router.waiting:
                continue
            outcomes = router.dispatch(self._now)
            for outcome in outcomes:
                self._place(outcome)
            if outcomes:
                self._gossip(number)
            if not self._is_watching_queue and router.waiting:
                self._is_watching_queue = True
                self._at(self._now + STILL_WAITING_S, self._look_again)

    def _look_again(self) -> None:
        self._is_watching_queue = False
        self._touched = [True] * len(self._touched)

    def _place(self, outcome: Outcome) -> None:
        request = self._open[outcome.request_id]
        if not isinstance(outcome.result, Placed):
            self._fail(request)
            return
        self._unplaced_tokens -= request.request.isl_tokens
        placed = outcome.result
        request.placed_s = self._now
        request.predicted_tokens = (placed.prefill or placed.decode).overlap_blocks * self._config.block_size
        request.decode = self._fleet[placed.decode.worker_id]
        request.decode.assigned += 1
        if placed.prefill is not None:
            request.prefill = self._fleet[placed.prefill.worker_id]
            request.prefill.assigned += 1
        self._queue(request, request.prefill or request.decode, offer_kv=placed.prefill is not None)

    def _queue(
        self, request: OpenRequest, worker: SimWorker, *, offer_kv: bool = False, ticket: Ticket | None = None
    ) -> None:
        body = GenerateRequest(
            request_id=request.route.request_id,
            model=MODEL,
            prompt=b"",
            generated=() if ticket is None else (0,),
            stop=StopConditions(max_tokens=max(1, request.request.osl_tokens), ignore_eos=True),
            offer_kv=offer_kv,
            ticket=ticket,
        )
        facts = request.request
        hashes = unpack_hashes(request.route.sequence_hashes).tolist()
        request.sequence = sequence_for(body, facts.isl_tokens, hashes, facts.names, facts.thread)
        try:
            worker.queue(request.sequence, self._now)
        except MeshError:
            self._fail(request)
        self._follow(worker)

    def _fail(self, request: OpenRequest) -> None:
        self._routers[request.router].free(request.route.request_id, self._now, ok=False)
        self._records.failed(request)
        self._forget(request)

    def _forget(self, request: OpenRequest) -> None:
        del self._open[request.route.request_id]
        if request.decode is None:
            self._unplaced_tokens -= request.request.isl_tokens
        self._touched[request.router] = True
        self._last_end_s = self._now
        if request.offer:
            self._release(request)
        for worker in (request.prefill, request.decode):
            if worker is not None:
                worker.assigned -= 1
                self._check_drained(worker)
        if self._config.concurrency:
            for arrival in self._take_next(1):
                self._submit(arrival)
        self._on_end()

    # --- what workers tell --------------------------------------------------------------------------------

    def _follow(self, worker: SimWorker) -> None:
        """After anything that was done to a worker: hear its news, know when it is to wake."""
        if worker.wakes != worker.followed:
            worker.followed = worker.wakes
            self._at(worker.due_s, self._wake, worker, worker.wakes)
        if events := worker.take_events():
            self._later(self._config.event_lag_s, self._tell, worker, as_told(events))

    def _wake(self, worker: SimWorker, number: int) -> None:
        if number == worker.wakes:
            worker.wake()
            self._follow(worker)

    def _tell(self, worker: SimWorker, events: Sequence[KvEvent]) -> None:
        for router in self._routers:
            router.fleet.on_kv_events(worker.worker_id, 0, events)

    def _take_outputs(self, worker: SimWorker, outputs: Sequence[Output], _: float) -> None:
        for output in outputs:
            request = self._open[output.request_id]
            delta = output.delta
            if request.first_s < 0:
                self._first(request, delta.cached_tokens or 0)
            if output.handoff:
                self._hand_over(request, output)
                continue
            if request.offer:  # with the first delta the decode worker is done with the offer
                self._release(request)
            if delta.finish_reason is not None:
                self._end(request)

    def _first(self, request: OpenRequest, cached_tokens: int) -> None:
        request.first_s = self._now
        request.cached_tokens = cached_tokens
        self._records.began(request, self._now + self._config.hop_s)
        self._routers[request.router].prefill_done(request.route.request_id, self._now)
        self._touched[request.router] = True
        self._gossip(request.router)

    def _hand_over(self, request: OpenRequest, output: Output) -> None:
        assert request.prefill is not None and request.decode is not None
        request.offer = output.handoff
        ticket = Ticket(
            offer_id=0,
            worker_id=request.prefill.worker_id,
            address="",
            backend=TRANSFER,
            nonce=1,
            block_ids=output.handoff,
            num_tokens=output.num_tokens,
        )
        self._later(2 * self._config.hop_s, self._go_on, request, ticket)

    def _go_on(self, request: OpenRequest, ticket: Ticket) -> None:
        assert request.decode is not None
        self._queue(request, request.decode, ticket=ticket)

    def _release(self, request: OpenRequest) -> None:
        blocks, request.offer = request.offer, ()
        assert request.prefill is not None
        request.prefill.release(blocks, self._now)
        self._follow(request.prefill)

    def _begin_pull(self, worker: SimWorker, pull: Pull, when: float) -> None:
        ticket = pull.sequence.request.ticket
        assert ticket is not None
        missing = ticket.num_tokens - pull.skip * worker.pool.block_size
        self._at(when + missing * self._pull_s_per_token, self._end_pull, worker, pull.sequence)

    def _end_pull(self, worker: SimWorker, sequence: SequenceState) -> None:
        worker.pull_ended(sequence, self._now)
        self._follow(worker)

    def _end(self, request: OpenRequest) -> None:
        self._routers[request.router].free(request.route.request_id, self._now)
        self._records.ended(request, self._now + self._config.hop_s)
        self._forget(request)
        self._gossip(request.router)

    # --- what routers tell each other ----------------------------------------------------------------------

    def _gossip(self, number: int) -> None:
        """What this router has placed by now, as the others will know it a little later."""
        if len(self._routers) > 1 and (changed := self._routers[number].load.take_own_changes()):
            self._later(self._config.gossip_lag_s, self._hear, number, changed)

    def _hear(self, number: int, changed: Mapping[Holder, Share]) -> None:
        for other, router in enumerate(self._routers):
            if other != number:
                router.load.update_elsewhere(str(number), changed, self._now)
                self._touched[other] = True

    def _report_progress(self) -> None:
        """As frontends do: how far answers have grown, in blocks."""
        block_size = self._config.block_size
        for request in self._open.values():
            if request.first_s >= 0 and request.sequence is not None:
                osl_tokens = len(request.sequence.output)
                if (blocks := 1 + osl_tokens // block_size) != request.told_blocks:
                    request.told_blocks = blocks
                    self._routers[request.router].progress(request.route.request_id, osl_tokens, self._now)
        self._at(self._now + PROGRESS_S, self._report_progress)

    # --- the fleet -----------------------------------------------------------------------------------------

    def _begin_watching(self) -> None:
        self._at(PROGRESS_S, self._report_progress)
        self._at(self._config.sample_s, self._sample)
        if self._hook is not None:
            self._at(self._hook.interval_s, self._ask, self._hook, 1)

    def _sample(self) -> None:
        waiting = sum(router.waiting for router in self._routers)
        next_s = self._records.sample(self._now, self._fleet, waiting)
        self._at(next_s, self._sample)

    def _ask(self, hook: PlannerHook, number: int) -> None:
        """The `number`-th time that the planner is asked."""
        for worker in self._fleet.workers:
            worker.settle(self._now)
            worker.stir(self._now)
            self._follow(worker)
        every = max(1, round(hook.traffic_s / hook.interval_s))
        decoding = self._fleet.decoding_role
        queued = self._unplaced_tokens
        observation = Observation(
            at_s=self._now,
            prefill=self._fleet.count(Role.PREFILL),
            decode=self._fleet.count(decoding),
            traffic=self._records.take_traffic(self._now) if number % every == 0 else None,
            prefill_loads=self._fleet.loads(Role.PREFILL, queued),
            decode_loads=self._fleet.loads(decoding, queued if decoding is Role.AGGREGATED else 0),
        )
        decision = hook.decide(observation)
        self._records.decided(decision)
        self._apply(decision)
        self._at((number + 1) * hook.interval_s, self._ask, hook, number + 1)

    def _apply(self, decision: ScalingDecision) -> None:
        decoding = self._fleet.decoding_role
        if decision.flip is not None and decoding is Role.DECODE:
            into = Role(decision.flip.to_role)
            source = Role.PREFILL if into is Role.DECODE else Role.DECODE
            for worker, _ in zip(self._fleet.least_loaded(source), range(decision.flip.count), strict=False):
                worker.turns_into = into
                self._records.flipped += 1
                self._leave(worker, SimWorkerState.TURNING)
        if decoding is Role.DECODE:
            self._scale(Role.PREFILL, decision.prefill)
        self._scale(decoding, decision.decode)

    def _scale(self, role: Role, wanted: int) -> None:
        surplus = self._fleet.count(role).ordered - wanted
        for _ in range(-surplus):
            worker = self._fleet.order(role, self._now)
            self._records.started += 1
            self._at(self._now + self._config.start_s, self._join, worker)
        for worker, _ in zip(self._fleet.least_loaded(role), range(surplus), strict=False):
            self._records.stopped += 1
            self._leave(worker, SimWorkerState.DRAINING)

    def _join(self, worker: SimWorker, since_s: float | None = None) -> None:
        worker.state = SimWorkerState.READY
        for number, router in enumerate(self._routers):
            router.add_worker(worker.card, self._now if since_s is None else since_s)
            self._touched[number] = True
        if events := worker.pool.snapshot():
            self._later(self._config.event_lag_s, self._tell, worker, as_told(events))

    def _leave(self, worker: SimWorker, state: SimWorkerState) -> None:
        """It gets no more requests; those that it has been given it finishes."""
        worker.state = state
        for number, router in enumerate(self._routers):
            router.remove_worker(worker.worker_id, self._now)
            self._touched[number] = True
        self._check_drained(worker)

    def _check_drained(self, worker: SimWorker) -> None:
        if worker.assigned or worker.state not in (SimWorkerState.DRAINING, SimWorkerState.TURNING):
            return
        if worker.state is SimWorkerState.TURNING:
            self._at(self._now + self._config.flip_s, self._turn, worker)
            return
        self._records.gone(worker)
        self._fleet.end(worker, self._now)

    def _turn(self, worker: SimWorker) -> None:
        self._fleet.turn(worker)
        self._join(worker)
