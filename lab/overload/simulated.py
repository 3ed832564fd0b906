"""Overload a mesh in simulated time: the live router's state, the live schedulers, and clients with deadlines.

It answers as `kvmesh.overload.client.send` does, within seconds and always alike.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct

from kvmesh.lab.overload.client import AGAIN_S, ANSWER_S, ClosedLoop, LoadAnswer
from kvmesh.lab.overload.shapes import PlannedRequest, block_names
from kvmesh.protocol.errors import DeadlineExceededError, MeshError, OverloadedError
from kvmesh.protocol.hashing import unpack_hashes
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import GenerateRequest, Placed, Role, RouteRequest, StopConditions, Ticket
from kvmesh.router.core import Outcome
from kvmesh.simulator.agenda import Agenda
from kvmesh.simulator.config import SimConfig, pull_s_per_token_of
from kvmesh.simulator.fleet import MODEL, TRANSFER, SimFleet
from kvmesh.simulator.routers import SimRouters
from kvmesh.simulator.sequence import prompt_hashes, sequence_for
from kvmesh.simulator.worker import SimWorker, SimWorkerState
from kvmesh.workers.scheduler import KvPull, Output, SequenceState

PROGRESS_S = 2.0  # as frontends tell the router of answers that grow
DEFAULT_DEADLINE_S = 600.0  # of a frontend, where a client names none
LOOK_S = 0.05  # between two looks at queues, as something happens in a live router at least so often
REFUSED, TOO_LATE, FAILED = 429, 504, 500


class _Flight(Struct, kw_only=True, eq=False):
    """A request between its arrival and its end."""

    planned: PlannedRequest
    route: RouteRequest
    router: int
    at_s: float
    began_s: float  # the load that it belongs to
    on_answer: Callable[[LoadAnswer], None]
    first_s: float = -1.0
    placed: Placed | None = None
    offer: tuple[int, ...] = ()
    sequence: SequenceState | None = None


class SimulatedMesh:
    """Serves requests in simulated time. What its routers have learned stays from one load to the next."""

    def __init__(self, config: SimConfig) -> None:
        self._config = config
        self.agenda = Agenda()
        self.routers = SimRouters(config, self.agenda)
        self._follow = self.routers.follow
        self._pull_s_per_token = pull_s_per_token_of(config)
        self.fleet = SimFleet(config, self._take_outputs, self._begin_pull)
        self._flights: dict[RequestId, _Flight] = {}
        self._numbers = itertools.count()
        for number in range(config.workers):
            worker = self.fleet.order(Role.PREFILL if number < config.num_prefill else self.fleet.decoding_role, 0.0)
            worker.state = SimWorkerState.READY
            self.routers.add_worker(worker.card, -1000.0)
        self.agenda.at(PROGRESS_S, self._report_progress)
        if config.load_report_interval_s:
            self.agenda.at(config.load_report_interval_s, self.routers.report_load, self.fleet.workers)
        self.agenda.at(LOOK_S, self._look)

    # --- clients ------------------------------------------------------------------------------------------

    def send(self, requests: Sequence[PlannedRequest], loop: ClosedLoop | None = None) -> list[LoadAnswer]:
        """Send requests at their times from now on, or in a closed loop. Return when all are answered."""
        answers: list[LoadAnswer] = []
        began_s = self.agenda.now
        if loop is None:
            for one in requests:
                self.agenda.at(began_s + one.at_s, self._arrive, one, began_s, answers.append)
            expected = len(requests)
            self._work(lambda: len(answers) == expected)
            return answers
        todo = itertools.cycle(requests)
        idle = 0

        def ask(one: PlannedRequest) -> None:
            nonlocal idle
            if self.agenda.now - began_s < loop.seconds:
                self._arrive(one, began_s, partial(took, one))
            else:
                idle += 1

        def took(one: PlannedRequest, answer: LoadAnswer) -> None:
            answers.append(answer)
            if answer.is_whole:
                self.agenda.at(self.agenda.now, ask, next(todo))
            else:  # refused: the same again, for others may be shorter than most
                self.agenda.at(self.agenda.now + AGAIN_S, ask, one)

        for _ in range(loop.clients):
            self.agenda.at(began_s, ask, next(todo))
        self._work(lambda: idle == loop.clients)
        return answers

    def _work(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self.agenda.now = self.agenda.due_s
            self.agenda.run_due()
            while True in self.routers.touched:
                self._dispatch()
                self.agenda.run_due()

    def _arrive(self, planned: PlannedRequest, began_s: float, on_answer: Callable[[LoadAnswer], None]) -> None:
        number, now = next(self._numbers), self.agenda.now
        route = RouteRequest(
            request_id=RequestId(str(number)),
            model=MODEL,
            isl_tokens=planned.isl_tokens,
            sequence_hashes=prompt_hashes(block_names(planned, self._config.block_size)),
            max_tokens=planned.max_tokens,
            has_deadline=planned.deadline_s > 0,
        )
        router = number % self._config.routers
        flight = _Flight(planned=planned, route=route, router=router, at_s=now, began_s=began_s, on_answer=on_answer)
        self._flights[route.request_id] = flight
        deadline_s = planned.deadline_s or DEFAULT_DEADLINE_S
        gives_up_s, left = (planned.leaves_s, True) if planned.leaves_s else (planned.deadline_s or ANSWER_S, False)
        self.agenda.at(now + gives_up_s, self._give_up, flight, left)
        state = self.routers.states[router]
        self.routers.touched[router] = True
        try:
            state.check(route, now, now + deadline_s)
            placed = state.try_place(route, now, now + deadline_s)
            displaced = [] if placed is not None else state.submit(route, now, now + deadline_s)
        except MeshError as error:
            self._fail(flight, error)
            return
        if placed is not None:
            self._place(flight, placed)
        for outcome in displaced:
            self._settle(outcome)

    def _give_up(self, flight: _Flight, left: bool) -> None:
        if flight.route.request_id in self._flights:
            self._end(flight, 0 if left or flight.placed is not None else TOO_LATE, left=left)

    def _fail(self, flight: _Flight, error: MeshError) -> None:
        refused = isinstance(error, OverloadedError)
        self._end(flight, REFUSED if refused else TOO_LATE if isinstance(error, DeadlineExceededError) else FAILED)

    def _end(self, flight: _Flight, status: int, *, is_whole: bool = False, left: bool = False) -> None:
        """Forget a request wherever it is, and answer its client."""
        now, request_id = self.agenda.now, flight.route.request_id
        del self._flights[request_id]
        state = self.routers.states[flight.router]
        if flight.sequence is not None:
            state.progress(request_id, len(flight.sequence.output), now)
            if is_whole:
                state.admission.finished(request_id, len(flight.sequence.output))
        state.free(request_id, now, ok=is_whole)
        self.routers.touched[flight.router] = True
        self.routers.gossip(flight.router)
        self._release(flight)
        if flight.placed is not None and not is_whole:
            for target in (flight.placed.prefill, flight.placed.decode):
                if target is not None:
                    worker = self.fleet[target.worker_id]
                    worker.abort(request_id, now)
                    self._follow(worker)
        flight.on_answer(
            LoadAnswer(
                at_s=flight.at_s - flight.began_s,
                late_s=0.0,
                status=status,
                first_s=flight.first_s - flight.at_s if flight.first_s >= 0 else 0.0,
                end_s=now - flight.at_s,
                tokens=flight.planned.osl_tokens if is_whole else 0,
                is_whole=is_whole,
                deadline_s=flight.planned.deadline_s,
                left=left,
            )
        )

    # --- placements ---------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        for number, state in enumerate(self.routers.states):
            if not self.routers.touched[number]:
                continue
            self.routers.touched[number] = False
            for outcome in state.dispatch(self.agenda.now):
                self._settle(outcome)

    def _look(self) -> None:
        self.routers.touched = [True] * len(self.routers.touched)
        self.agenda.at(self.agenda.now + LOOK_S, self._look)

    def _settle(self, outcome: Outcome) -> None:
        flight = self._flights.get(outcome.request_id)
        if flight is None:
            return
        if isinstance(outcome.result, Placed):
            self._place(flight, outcome.result)
        else:
            self._fail(flight, outcome.result)

    def _place(self, flight: _Flight, placed: Placed) -> None:
        flight.placed = placed
        self.routers.gossip(flight.router)
        target = placed.prefill or placed.decode
        self._queue(flight, self.fleet[target.worker_id], offer_kv=placed.prefill is not None)

    def _queue(
        self, flight: _Flight, worker: SimWorker, *, offer_kv: bool = False, ticket: Ticket | None = None
    ) -> None:
        body = GenerateRequest(
            request_id=flight.route.request_id,
            model=MODEL,
            prompt=b"",
            generated=() if ticket is None else (0,),
            stop=StopConditions(max_tokens=flight.planned.osl_tokens, ignore_eos=True),
            offer_kv=offer_kv,
            ticket=ticket,
        )
        hashes = unpack_hashes(flight.route.sequence_hashes).tolist()
        names = block_names(flight.planned, self._config.block_size)
        number = int(flight.route.request_id)
        flight.sequence = sequence_for(body, flight.planned.isl_tokens, hashes, names, number)
        try:
            worker.queue(flight.sequence, self.agenda.now)
        except MeshError as error:
            self._fail(flight, error)
        self._follow(worker)

    # --- what workers report ------------------------------------------------------------------------------

    def _take_outputs(self, worker: SimWorker, outputs: Sequence[Output], _: float) -> None:
        for output in outputs:
            flight = self._flights.get(output.request_id)
            if flight is None:
                if output.handoff:
                    worker.release(output.handoff, self.agenda.now)
                continue
            if flight.first_s < 0:
                self._first(flight)
            if output.handoff:
                self._hand_over(flight, output)
                continue
            self._release(flight)
            if output.delta.finish_reason is not None:
                self._end(flight, 200, is_whole=True)

    def _first(self, flight: _Flight) -> None:
        flight.first_s = self.agenda.now
        self.routers.states[flight.router].prefill_done(flight.route.request_id, self.agenda.now)
        self.routers.touched[flight.router] = True
        self.routers.gossip(flight.router)

    def _hand_over(self, flight: _Flight, output: Output) -> None:
        assert flight.placed is not None and flight.placed.prefill is not None
        flight.offer = output.handoff
        ticket = Ticket(
            offer_id=0,
            worker_id=flight.placed.prefill.worker_id,
            address="",
            backend=TRANSFER,
            nonce=1,
            block_ids=output.handoff,
            num_tokens=output.num_tokens,
        )
        self.agenda.later(2 * self._config.hop_s, self._continue, flight, ticket)

    def _continue(self, flight: _Flight, ticket: Ticket) -> None:
        if flight.route.request_id in self._flights and flight.placed is not None:
            self._queue(flight, self.fleet[flight.placed.decode.worker_id], ticket=ticket)

    def _release(self, flight: _Flight) -> None:
        blocks, flight.offer = flight.offer, ()
        if blocks and flight.placed is not None and flight.placed.prefill is not None:
            worker = self.fleet[flight.placed.prefill.worker_id]
            worker.release(blocks, self.agenda.now)
            self._follow(worker)

    def _begin_pull(self, worker: SimWorker, pull: KvPull, when: float) -> None:
        ticket = pull.sequence.request.ticket
        assert ticket is not None
        missing = ticket.num_tokens - pull.skip * worker.pool.block_size
        self.agenda.at(when + missing * self._pull_s_per_token, self._end_pull, worker, pull)

    def _end_pull(self, worker: SimWorker, pull: KvPull) -> None:
        if pull.sequence.aborted:
            worker.settle(self.agenda.now)
            worker.scheduler.pull_given_up(pull)
            worker.scheduler.pull_let_go(pull)
            worker.stir(self.agenda.now)
        else:
            worker.pull_ended(pull, self.agenda.now)
        self._follow(worker)

    def _report_progress(self) -> None:
        now = self.agenda.now
        for request_id, flight in self._flights.items():
            if flight.first_s >= 0 and flight.sequence is not None:
                self.routers.states[flight.router].progress(request_id, len(flight.sequence.output), now)
        self.agenda.at(now + PROGRESS_S, self._report_progress)
