"""Simulate a mesh by discrete events: arrivals, ends of steps, pulls, events with a lag, and a planner."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from kvmesh.protocol.errors import ConfigError, MeshError
from kvmesh.protocol.hashing import unpack_hashes
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import GenerateRequest, Placed, Role, RouteRequest, StopConditions, Ticket
from kvmesh.router.core import Outcome
from kvmesh.simulator.agenda import Agenda
from kvmesh.simulator.config import SimConfig, pull_s_per_token_of
from kvmesh.simulator.fleet import MODEL, TRANSFER, SimFleet
from kvmesh.simulator.hook import PlannerHook, PlannerLoop
from kvmesh.simulator.open_request import OpenRequest, SimAnswer
from kvmesh.simulator.records import Records
from kvmesh.simulator.report import SimReport
from kvmesh.simulator.requests import SimRequest
from kvmesh.simulator.routers import SimRouters
from kvmesh.simulator.sequence import prompt_hashes, sequence_for
from kvmesh.simulator.worker import SimWorker, SimWorkerState
from kvmesh.workers.scheduler import KvPull, Output, PeerLoad, TierLoad

PROGRESS_S = 2.0  # as frontends tell the router of answers that grow
PATIENCE_S = 6 * 3600.0  # if nothing ends for this long, the open requests never will
_SETTLED_S = -1e6  # when the first workers joined


def simulate(
    requests: Iterable[SimRequest],
    config: SimConfig,
    hook: PlannerHook | None = None,
    on_end: Callable[[], object] = bool,
    on_answer: Callable[[SimAnswer], object] = bool,
) -> SimReport:
    """Serve `requests`, which come in order of arrival, until the last has ended. `on_end` is called at each end,
    `on_answer` with the figures of each request that was answered.

    Raises ConfigError for requests that were made for another block size, or out of order.
    """
    return World(config, hook, on_end, on_answer).run(requests)


class World:
    def __init__(
        self,
        config: SimConfig,
        hook: PlannerHook | None,
        on_end: Callable[[], object],
        on_answer: Callable[[SimAnswer], object],
    ) -> None:
        self._config = config
        self._hook = hook
        self._on_end = on_end
        self._on_answer = on_answer
        self._agenda = Agenda()
        self._routers = SimRouters(config, self._agenda)
        self._follow = self._routers.follow
        self._open: dict[RequestId, OpenRequest] = {}
        self._unplaced_tokens = 0
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
        """Simulate the requests. Requests of one instant are queued together before one is placed."""
        self._arrivals = opened(requests, self._config)
        self._begin_watching()
        if self._config.concurrency:
            for arrival in self._take_next(self._config.concurrency):
                self._submit(arrival)
            self._dispatch()
            self._work(iter(()))
        else:
            self._work(self._arrivals)
        worker_s, gpu_s = self._fleet.seconds_until(self._agenda.now)
        return self._records.report(self._agenda.now, worker_s, gpu_s, self._fleet.workers)

    # --- time -------------------------------------------------------------------------------------------

    def _work(self, arrivals: Iterator[OpenRequest]) -> None:
        agenda = self._agenda
        arrival = next(arrivals, None)
        while arrival is not None or self._open:
            due_s = agenda.due_s
            agenda.now = now = due_s if arrival is None or due_s < arrival.arrival_s else arrival.arrival_s
            if self._is_stuck(arrival):
                break
            agenda.run_due()
            if arrival is not None and arrival.arrival_s <= now:
                first, arrival = arrival, next(arrivals, None)
                self._is_alone = (arrival is None or arrival.arrival_s > now) and True not in self._routers.touched
                self._submit(first)
                self._is_alone = False
            while arrival is not None and arrival.arrival_s <= now:
                self._submit(arrival)
                arrival = next(arrivals, None)
            if True in self._routers.touched:
                self._dispatch()

    def _is_stuck(self, arrival: OpenRequest | None) -> bool:
        """Fail all open requests if nothing has ended for a long time. Return whether that is so."""
        if arrival is not None or self._agenda.now - self._last_end_s < PATIENCE_S:
            return False
        self._agenda.now = self._last_end_s
        for request in list(self._open.values()):
            self._fail(request)
        return True

    # --- requests ----------------------------------------------------------------------------------------

    def _take_next(self, most: int) -> Iterator[OpenRequest]:
        """Return the next requests of a closed loop, where requests arrive when others end."""
        for _ in range(most):
            if (request := next(self._arrivals, None)) is None:
                return
            request.arrival_s = self._agenda.now
            yield request

    def _submit(self, request: OpenRequest) -> None:
        self._open[request.route.request_id] = request
        self._unplaced_tokens += request.request.isl_tokens
        self._records.arrived(request)
        self._agenda.later(self._config.hop_s, self._route, request)

    def _route(self, request: OpenRequest) -> None:
        router = self._routers.states[request.router]
        try:
            if self._is_alone and (placed := router.try_place(request.route, self._agenda.now)) is not None:
                self._place(Outcome(request.route.request_id, placed))
                self._routers.gossip(request.router)
                return
            self._routers.touched[request.router] = True
            displaced = router.submit(request.route, self._agenda.now)
        except MeshError:
            self._fail(request)
            return
        for outcome in displaced:
            self._fail(self._open[outcome.request_id])

    def _dispatch(self) -> None:
        for number, router in enumerate(self._routers.states):
            if not self._routers.touched[number]:
                continue
            self._routers.touched[number] = False
            if not router.waiting:
                continue
            outcomes = router.dispatch(self._agenda.now)
            for outcome in outcomes:
                self._place(outcome)
            if outcomes:
                self._routers.gossip(number)
            if router.waiting:
                self._routers.watch_queues()

    def _place(self, outcome: Outcome) -> None:
        request = self._open[outcome.request_id]
        if not isinstance(outcome.result, Placed):
            self._fail(request)
            return
        self._unplaced_tokens -= request.request.isl_tokens
        placed = outcome.result
        request.placed_s, request.source = self._agenda.now, placed.source
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
            source=request.source if ticket is None else None,
        )
        facts = request.request
        hashes = unpack_hashes(request.route.sequence_hashes).tolist()
        request.sequence = sequence_for(body, facts.isl_tokens, hashes, facts.names, facts.thread)
        try:
            worker.queue(request.sequence, self._agenda.now)
        except MeshError:
            self._fail(request)
        self._follow(worker)

    def _fail(self, request: OpenRequest) -> None:
        self._routers.states[request.router].free(request.route.request_id, self._agenda.now, ok=False)
        self._records.failed(request)
        self._forget(request)

    def _forget(self, request: OpenRequest) -> None:
        del self._open[request.route.request_id]
        if request.decode is None:
            self._unplaced_tokens -= request.request.isl_tokens
        self._routers.touched[request.router] = True
        self._last_end_s = self._agenda.now
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
        request.first_s = self._agenda.now
        request.cached_tokens = cached_tokens
        self._records.began(request, self._agenda.now + self._config.hop_s)
        self._routers.states[request.router].prefill_done(request.route.request_id, self._agenda.now)
        self._routers.touched[request.router] = True
        self._routers.gossip(request.router)

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
        self._agenda.later(2 * self._config.hop_s, partial(self._queue, request, request.decode, ticket=ticket))

    def _release(self, request: OpenRequest) -> None:
        blocks, request.offer = request.offer, ()
        assert request.prefill is not None
        request.prefill.release(blocks, self._agenda.now)
        self._follow(request.prefill)

    def _begin_pull(self, worker: SimWorker, pull: KvPull, when: float) -> None:
        if isinstance(pull, TierLoad):
            assert worker.tiers is not None
            self._agenda.at(worker.tiers.ends_s(pull, when), self._end_pull, worker, pull)
            return
        if isinstance(pull, PeerLoad):
            pull_s = 2 * self._config.hop_s + len(pull.into) * worker.pool.block_size * self._pull_s_per_token
            self._agenda.at(when + pull_s, self._end_peer_load, worker, pull, pull_s)
            return
        ticket = pull.sequence.request.ticket
        assert ticket is not None
        missing = ticket.num_tokens - pull.skip * worker.pool.block_size
        self._agenda.at(when + missing * self._pull_s_per_token, self._end_pull, worker, pull)

    def _end_pull(self, worker: SimWorker, pull: KvPull) -> None:
        worker.pull_ended(pull, self._agenda.now)
        self._follow(worker)

    def _end_peer_load(self, worker: SimWorker, load: PeerLoad, took_s: float) -> None:
        """End a pull from a peer, which has given what it still has."""
        source = self._fleet.find(WorkerId(load.source.worker_id))
        there = 0 if source is None else source.pool.peek(load.prefix.names[: load.skip + len(load.into)])
        worker.peer_load_ended(load, max(0, there - load.skip), took_s, self._agenda.now)
        self._follow(worker)

    def _end(self, request: OpenRequest) -> None:
        state, request_id = self._routers.states[request.router], request.route.request_id
        state.admission.finished(request_id, request.request.osl_tokens)
        state.free(request_id, self._agenda.now)
        self._records.ended(request, self._agenda.now + self._config.hop_s)
        self._on_answer(request.answer(self._agenda.now, self._config.hop_s))
        self._forget(request)
        self._routers.gossip(request.router)

    def _report_progress(self) -> None:
        """Report to the routers how far answers have grown, in blocks, as frontends do."""
        block_size = self._config.block_size
        for request in self._open.values():
            if request.first_s >= 0 and request.sequence is not None:
                osl_tokens = len(request.sequence.output)
                if (blocks := 1 + osl_tokens // block_size) != request.told_blocks:
                    request.told_blocks = blocks
                    self._routers.states[request.router].progress(
                        request.route.request_id, osl_tokens, self._agenda.now
                    )
        self._agenda.at(self._agenda.now + PROGRESS_S, self._report_progress)

    # --- the fleet -----------------------------------------------------------------------------------------

    def _begin_watching(self) -> None:
        self._agenda.at(PROGRESS_S, self._report_progress)
        if every_s := self._config.load_report_interval_s:
            self._agenda.at(every_s, self._routers.report_load, self._fleet.workers)
        self._agenda.at(self._config.sample_s, self._sample)
        if self._hook is not None:
            PlannerLoop(
                self._hook,
                self._agenda,
                self._fleet,
                self._records,
                unplaced_tokens=lambda: self._unplaced_tokens,
                bring_up_to_now=self._bring_up_to_now,
                order=self._order,
                leave=self._leave,
            )

    def _sample(self) -> None:
        next_s = self._records.sample(self._agenda.now, self._fleet, self._routers.waiting)
        self._agenda.at(next_s, self._sample)

    def _bring_up_to_now(self, worker: SimWorker) -> None:
        worker.settle(self._agenda.now)
        worker.stir(self._agenda.now)
        self._follow(worker)

    def _order(self, role: Role) -> None:
        worker = self._fleet.order(role, self._agenda.now)
        self._agenda.at(self._agenda.now + self._config.start_s, self._join, worker)

    def _join(self, worker: SimWorker, since_s: float | None = None) -> None:
        worker.state = SimWorkerState.READY
        self._routers.add_worker(worker.card, self._agenda.now if since_s is None else since_s)
        self._routers.tell(worker, worker.snapshot())

    def _leave(self, worker: SimWorker, state: SimWorkerState) -> None:
        """Let a worker leave. It gets no more requests and finishes those it has."""
        worker.state = state
        self._routers.remove_worker(worker.worker_id)
        self._check_drained(worker)

    def _check_drained(self, worker: SimWorker) -> None:
        if worker.assigned or worker.state not in (SimWorkerState.DRAINING, SimWorkerState.TURNING):
            return
        if worker.state is SimWorkerState.TURNING:
            self._agenda.at(self._agenda.now + self._config.flip_s, self._turn, worker)
            return
        self._records.gone(worker)
        self._fleet.end(worker, self._agenda.now)

    def _turn(self, worker: SimWorker) -> None:
        self._fleet.turn(worker)
        self._join(worker)


def opened(requests: Iterable[SimRequest], config: SimConfig) -> Iterator[OpenRequest]:
    """Read the requests as they are needed. Raises ConfigError for another block size, or a wrong order."""
    block_size, last_s = config.block_size, 0.0
    for number, request in enumerate(requests):
        if len(request.names) != request.isl_tokens // block_size * 8:
            found = f"a prompt of {request.isl_tokens} tokens has {len(request.names) // 8} names of blocks"
            raise ConfigError(f"{found}, blocks of {block_size} tokens make another number of names")
        if request.arrival_s < last_s and not config.concurrency:
            raise ConfigError(f"request {number} arrives at {request.arrival_s} s, the one before at {last_s} s")
        last_s = request.arrival_s
        route = RouteRequest(
            request_id=RequestId(str(number)),
            model=MODEL,
            isl_tokens=request.isl_tokens,
            sequence_hashes=prompt_hashes(request.names),
            tenant=request.tenant,
            has_deadline=config.states_deadline,
        )
        yield OpenRequest(request, route, number % config.routers, request.arrival_s)
