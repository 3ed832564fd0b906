"""The router as a pure state machine: cards, KV events and requests come in, placements go out.

The live service, a replayed trace and the tests drive this same object; time is a parameter. A request is submitted;
`dispatch` then places all that can be placed, in the order of the queue. Call it after anything that may let a waiting
request go: a submission, a first token, an end, a worker that came or left.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.protocol.errors import DeadlineExceededError, MeshError, NoWorkerError, OverloadedError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import Explanation, Placed, RouteRequest, Target, WorkerCard
from kvmesh.router.admission import FAINT, HOPEFUL, AdmissionControl, Placing, RefusedError
from kvmesh.router.affinity import SessionAffinity, SessionKey, session_key
from kvmesh.router.explain import explain
from kvmesh.router.fleet import Pool, WorkerFleet
from kvmesh.router.index import Holder
from kvmesh.router.load import ActiveLoad, Owner
from kvmesh.router.pairing import UNKNOWN_PAIRS
from kvmesh.router.placing import (
    NOTHING_AHEAD,
    Ahead,
    PlacementPlan,
    has_room,
    is_packed,
    look,
    most_saved_tokens,
    plan,
    prefix_of,
    running_on,
    saved_tokens,
    source_of,
    who_may,
)
from kvmesh.router.prediction import CachePredictions
from kvmesh.router.queue import MAX_ASKED, Pending, PendingQueue
from kvmesh.router.reported import ReportedLoad
from kvmesh.router.rules import RouterRules
from kvmesh.router.selection import Candidate

LOOK_S = 0.25  # between searches of the queues for requests that have become hopeless
FEW_ASKED = 4  # of the requests that wait, while all prefill workers are full
RESERVE_AFTER_S = 5.0  # a request that has waited so long for a worker gets it before smaller requests do
_FOREVER = float("inf")


class Outcome(NamedTuple):
    """The result of a submitted request: placed and booked, or failed."""

    request_id: RequestId
    result: Placed | MeshError


class QueuedRequest(Struct):
    request: RouteRequest
    arrived_s: float
    deadline_s: float


class RouterState:
    """Places requests on workers. `fleet` tracks the workers and their caches, `load` the requests in flight."""

    def __init__(self, rules: RouterRules, seed: int = 0) -> None:
        self.rules = rules
        self.load = ActiveLoad(rules.lease_s)
        self.reported = ReportedLoad(self.load)
        predictions = CachePredictions(rules.predict_ttl_s, rules.approximate_ttl_s)
        self.fleet = WorkerFleet(self.load, predictions, ramp_s=rules.ramp_s, suspect_s=rules.suspect_s)
        self._rng = random.Random(seed)
        self._queues: dict[str, PendingQueue[QueuedRequest]] = {}  # by model, of models for which requests wait
        self._affinity = SessionAffinity(ttl_s=rules.affinity_ttl_s)
        self.admission = AdmissionControl(rules.admission)
        self._looked_s = 0.0  # for hopeless requests
        # expired: bookings that nobody ended; kvmesh.router.pairing.REASONS, UNKNOWN_PAIRS: placements
        self.stats: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """The number of requests in the queues."""
        return sum([len(queue) for queue in self._queues.values()])

    def add_worker(self, card: WorkerCard, now: float = 0.0) -> None:
        """Add a worker, or replace its card."""
        self.fleet.add_worker(card, now)

    def remove_worker(self, worker_id: WorkerId, now: float = 0.0) -> None:
        """Forget a worker with its blocks, bookings and sessions. An unknown worker is no error."""
        self.reported.forget(worker_id, now)
        self.fleet.remove_worker(worker_id, now)
        self._affinity.forget_worker(worker_id)
        self.admission.keep(self.fleet.pools, self.load.__contains__)

    # --- requests --------------------------------------------------------------------------------------------------

    def try_place(self, request: RouteRequest, now: float, deadline_s: float = _FOREVER) -> Placed | None:
        """Place and book a request at once if no request waits and a worker has room; None: `submit` it.

        The placement is the one that `submit` and `dispatch` would make. Raises NoWorkerError, RefusedError.
        """
        fleet = self.fleet
        if request.exclude or fleet.avoided_until:
            fleet.avoid(request.exclude, now)
        self.admission.came(request.model, now)
        pool = fleet.pools.get(request.model)
        if pool is not None and (self._queues.get(request.model) or not has_room(pool.slots, self.rules, now)):
            return None
        planned = self._plan(request, now)
        if planned.is_full:
            return None
        placing = _placing(planned, deadline_s)
        self.admission.check_placing(request, placing, now, stands=None, retry_after_s=1.0)
        return self._book(planned, placing, now, waited_s=0.0)

    def submit(self, request: RouteRequest, now: float, deadline_s: float = _FOREVER) -> Sequence[Outcome]:
        """Let a request wait for `dispatch`. Return the requests that it displaced from the queue, as failed.

        Raises NoWorkerError if there is no worker for it, OverloadedError if the queue is full, RefusedError if it
        would not be answered in time.
        """
        self.fleet.avoid(request.exclude, now)
        pool, decoders, prefillers = who_may(self.fleet, request, now)
        overlaps, _ = self.fleet.find(pool, request.sequence_hashes, now)
        cached = most_saved_tokens(self.fleet, pool, overlaps, prefillers or decoders, self.rules.weights)
        pending = _pending(request, max(0, request.isl_tokens - cached), now, deadline_s)
        queue = self._queues.get(request.model)
        if queue is None:
            queue = PendingQueue(self.rules.queue)
        self._check_wait(pending, queue, now)
        displaced = queue.push(pending, now)
        self._queues[request.model] = queue
        return [Outcome(other.request_id, queue.refusal(now)) for other in displaced]

    def check(self, request: RouteRequest, now: float, deadline_s: float) -> None:
        """Raise RefusedError if a request would be refused even if nothing of its prompt had to be computed.

        It is a quick look, before the prompt is known. Nothing is booked or remembered.
        """
        self.admission.came(request.model, now)
        if (queue := self._queues.get(request.model)) is not None:
            self._check_wait(_pending(request, 0, now, deadline_s), queue, now)

    def _check_wait(self, pending: Pending[QueuedRequest], queue: PendingQueue[QueuedRequest], now: float) -> None:
        gap_s = self.admission.gap_s(pending.payload.request.model)
        wait_s = queue.wait_s(pending, now, gap_s) if queue else 0.0
        self.admission.check_wait(
            pending.payload.request,
            pending.uncached_tokens,
            wait_s,
            pending.deadline_s - now,
            self._stands(pending.payload.request.model, queue, now),
            running_on(self.fleet.pools.get(pending.payload.request.model)),
            retry_after_s=queue.retry_after_s(now),
        )

    def dispatch(self, now: float) -> list[Outcome]:
        """Place what can be placed now, and fail what can no longer be served in time."""
        outcomes: list[Outcome] = []
        self.fleet.forgive(now)
        looks = now - self._looked_s >= LOOK_S
        for model, queue in list(self._queues.items()):
            self.admission.waits(model, queue.since_s, now)
            outcomes += [Outcome(late.request_id, _too_late(late.payload, now)) for late in queue.expire(now)]
            if looks and self.rules.admission.is_on:
                self._looked_s = now
                outcomes += self._drop_hopeless(model, queue, now)
            outcomes += self._dispatch(self.fleet.pools.get(model), queue, now)
            self._tidy(model)
        return outcomes

    def _stands(self, model: str, queue: PendingQueue[QueuedRequest], now: float) -> bool:
        """Return whether a queue does not go away, or one has not long ago."""
        return self.admission.stands(model, queue.since_s if queue else now, now)

    def _drop_hopeless(self, model: str, queue: PendingQueue[QueuedRequest], now: float) -> list[Outcome]:
        """Take the requests out of a queue that will not be served in time any more."""
        stands, running = self._stands(model, queue, now), running_on(self.fleet.pools.get(model))

        def needs_s(item: Pending[QueuedRequest]) -> float:
            request, share = item.payload.request, FAINT if stands else HOPEFUL
            if not self.admission.judges_wait(request):
                return -_FOREVER
            return self.admission.needed_s(request, item.uncached_tokens, share, running)

        hopeless = queue.take_hopeless(now, needs_s)
        retry_after_s = queue.retry_after_s(now)
        return [Outcome(item.request_id, _hopeless(item.payload, now, retry_after_s)) for item in hopeless]

    def next_deadline(self) -> float | None:
        """Return when to call `dispatch` at the latest: a request times out, or an avoided worker is trusted again."""
        deadlines = [at for queue in self._queues.values() if (at := queue.next_deadline()) is not None]
        return min([*deadlines, *self.fleet.avoided_until.values()]) if deadlines else None

    def place(self, request: RouteRequest, now: float) -> Placed:
        """Place and book at once, whoever waits and however full the workers are. Raises NoWorkerError."""
        self.fleet.avoid(request.exclude, now)
        planned = self._plan(request, now)
        return self._book(planned, _placing(planned, _FOREVER), now, waited_s=0.0)

    def preview(self, request: RouteRequest, now: float) -> Placed:
        """Return where a request would run if it came now, with the explanation. Nothing is booked or remembered.

        Raises NoWorkerError.
        """
        draws = self._rng.getstate()
        try:
            planned = self._plan(request, now, scores_all=True)
        finally:
            self._rng.setstate(draws)
        waits = planned.is_full or bool(self._queues.get(request.model))
        placing = _placing(planned, _FOREVER)
        found = self.admission.estimate(request, placing.uncached_tokens, placing.queued_tokens, placing.running)
        explanation = replace(
            explain(planned),
            would_wait=waits,
            first_s=0.0 if found is None else round(found.first_s, 3),
            total_s=0.0 if found is None else round(found.total_s, 3),
        )
        return self._placed(planned, explanation)

    def resume(self, request: RouteRequest, placed: Placed, now: float, *, is_prefilling: bool) -> None:
        """Book again what a router placed that is gone: the request runs where that router said.

        Raises NoWorkerError if its workers are not known here, or not yet.
        """
        prefill = (placed.prefill if is_prefilling else None) or placed.decode
        holders = [Holder(target.worker_id, target.dp_rank) for target in (placed.decode, prefill)]
        for holder in holders:
            if holder not in self.fleet.slots:
                raise NoWorkerError(f"no worker {holder.worker_id!r} with a rank {holder.dp_rank} is known here")
        cached = prefill.overlap_blocks * self.fleet.slots[holders[1]].card.block_size
        uncached = max(0, request.isl_tokens - cached) if is_prefilling else 0
        self._take(request, holders[0], holders[1], uncached, now)
        self._predict(request, holders, now)
        if not is_prefilling:
            self.prefill_done(request.request_id, now)

    def prefill_done(self, request_id: RequestId, now: float = 0.0) -> None:
        """Note the first token of a request. Its blocks are computed, and events will soon report them."""
        holders, hashes = self.load.holders_of(request_id), self.load.hashes_of(request_id)
        for holder in holders:
            self.fleet.predictions.computed(request_id, holder, self.fleet.slots[holder].card, hashes, now)
        for holder in holders[1:]:  # the prefill worker is done with it
            self.fleet.warm_up.completed(holder.worker_id)
        self.load.prefill_done(request_id, now)
        self.admission.began(request_id, now)

    def progress(self, request_id: RequestId, osl_tokens: int, now: float) -> None:
        """Note that a request lives, and how many tokens it has by now."""
        holders = self.load.holders_of(request_id)
        if holders:
            self.admission.grew(request_id, osl_tokens)
            card = self.fleet.slots[holders[0]].card
            grown = self.load.progress(request_id, 1 + osl_tokens // card.block_size, now)
            if (queue := self._queues.get(card.model)) is not None:
                tenant, priority = self.load.owner_of(request_id)
                queue.charge(tenant, grown * card.block_size, priority)

    def free(self, request_id: RequestId, now: float = 0.0, *, ok: bool = True) -> None:
        """End a request that waits or runs; `ok`: it ended well. A second call does nothing."""
        for model, queue in self._queues.items():
            if queue.cancel(request_id) is not None:
                self._tidy(model)
                break
        holders = self.load.holders_of(request_id)
        if holders:
            self.admission.ended(request_id, now, self.load.of(holders[0]).total.requests)
        if ok:
            for holder in holders:
                self.fleet.warm_up.completed(holder.worker_id)
        else:
            self.fleet.predictions.failed(request_id)
        self.load.free(request_id, now)

    def sweep(self, now: float) -> list[RequestId]:
        """End the bookings that have shown no sign of life for too long, and return their requests."""
        expired = self.load.expired(now)
        for request_id in expired:
            self.free(request_id, now, ok=False)
        self.stats["expired"] += len(expired)
        self.admission.keep(self.fleet.pools, self.load.__contains__)
        return expired

    # --- the queue -------------------------------------------------------------------------------------------------

    def _dispatch(self, pool: Pool | None, queue: PendingQueue[QueuedRequest], now: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        ahead = Ahead()
        plans: dict[RequestId, PlacementPlan | MeshError] = {}
        has_some_room, tries = _room(pool, self.rules, now)

        def fits(item: Pending[QueuedRequest]) -> bool:
            nonlocal tries
            tries -= 1
            if tries < 0:
                return False
            planned = self._try_plan(item.payload.request, now, ahead, has_some_room)
            if planned is None:
                return False
            plans[item.request_id] = planned
            if isinstance(planned, MeshError) or not planned.is_full:
                return True
            if planned.first.is_full:
                holder = planned.first.chosen.holder
                ahead.tokens[holder] = ahead.tokens.get(holder, 0) + item.uncached_tokens
            if now - item.payload.arrived_s > RESERVE_AFTER_S and is_packed(planned.last.chosen, planned.view):
                ahead.reserved.add(planned.last.chosen.holder)
            return False

        while queue and (item := queue.pop_next(now, fits)) is not None:
            self.admission.drained(item.payload.request.model, queue.since_s, now)
            outcomes.append(Outcome(item.request_id, self._serve(item.payload, plans[item.request_id], queue, now)))
            ahead.clear()
            has_some_room, tries = _room(pool, self.rules, now)
        return outcomes

    def _serve(
        self,
        queued: QueuedRequest,
        planned: PlacementPlan | MeshError,
        queue: PendingQueue[QueuedRequest],
        now: float,
    ) -> Placed | MeshError:
        """Book a request whose turn has come, or return why it is not placed."""
        if isinstance(planned, MeshError):
            return planned
        placing = _placing(planned, queued.deadline_s)
        try:
            self.admission.check_placing(
                queued.request,
                placing,
                now,
                stands=self._stands(queued.request.model, queue, now),
                retry_after_s=queue.retry_after_s(now),
            )
        except OverloadedError as refusal:
            return refusal
        return self._book(planned, placing, now, now - queued.arrived_s)

    def _try_plan(
        self, request: RouteRequest, now: float, ahead: Ahead, has_some_room: bool
    ) -> PlacementPlan | MeshError | None:
        """Return a plan, or None if the request waits, or its error if no worker can ever take it."""
        try:
            if has_some_room:
                return self._plan(request, now, ahead)
            who_may(self.fleet, request, now)
            return None
        except MeshError as error:
            return error

    def _tidy(self, model: str) -> None:
        """Forget an empty queue: it remembers no tenant."""
        if not self._queues[model]:
            del self._queues[model]

    # --- placements ------------------------------------------------------------------------------------------------

    def _plan(
        self, request: RouteRequest, now: float, ahead: Ahead = NOTHING_AHEAD, scores_all: bool = False
    ) -> PlacementPlan:
        bound_to = None
        if request.session and self.rules.affinity_ttl_s:
            bound_to = self._affinity.get(_key(request), now)
        times = self.admission.times_of(request.model)
        return plan(look(self.fleet, self.rules, request, now, self._rng, ahead, bound_to, scores_all, times))

    def _book(self, planned: PlacementPlan, placing: Placing, now: float, waited_s: float) -> Placed:
        view, computes, decode = planned.view, planned.first.chosen, planned.last.chosen.holder
        request = view.request
        uncached = placing.uncached_tokens
        self._take(request, decode, computes.holder, uncached, now)
        chosen = [decode] if planned.first is planned.last else [decode, computes.holder]
        for holder in chosen:
            self.fleet.note_choice(holder)
        self._predict(request, chosen, now)
        self._remember(planned, uncached, now)
        if planned.apart is not None:
            self.stats.update(planned.apart.reasons)
        if planned.is_unknown:
            self.stats[UNKNOWN_PAIRS] += 1
        self.admission.placed(request.request_id, placing, now)
        return self._placed(planned, explain(planned, waited_s) if request.explain else None)

    def _take(self, request: RouteRequest, decode: Holder, prefill: Holder, prefill_tokens: int, now: float) -> None:
        self.load.book(
            request.request_id,
            decode=decode,
            prefill=prefill,
            prefill_tokens=prefill_tokens,
            hashes=request.sequence_hashes,
            owner=Owner(request.tenant, request.priority),
            now=now,
        )

    def _predict(self, request: RouteRequest, holders: Iterable[Holder], now: float) -> None:
        fleet = self.fleet
        for holder in holders:
            card = fleet.slots[holder].card
            fleet.predictions.placed(request.request_id, holder, card, request.sequence_hashes, now)

    def _remember(self, planned: PlacementPlan, uncached_tokens: int, now: float) -> None:
        """Remember what later placements depend on: the spread of the work, the session, the demand for the prefix."""
        request = planned.view.request
        pool = self.fleet.pools[request.model]
        pool.spread.add(uncached_tokens)
        if request.session and self.rules.affinity_ttl_s:
            self._affinity.bind(_key(request), planned.last.chosen.holder, now)
        deepest = max([c.overlap[-1] for c in planned.first.candidates])
        if deepest and not request.exclude:  # a retry is no demand
            pool.demand.asked(prefix_of(request.sequence_hashes, deepest), now)

    def _placed(self, planned: PlacementPlan, explanation: Explanation | None) -> Placed:
        lora = planned.view.request.lora
        return Placed(
            decode=self._target(planned.last.chosen, lora),
            prefill=None if planned.first is planned.last else self._target(planned.first.chosen, lora),
            reason=planned.reason,
            explanation=explanation,
            source=source_of(planned),
        )

    def _target(self, chosen: Candidate, lora: str | None) -> Target:
        card = self.fleet.slots[chosen.holder].card
        return card.target(chosen.holder.dp_rank, chosen.overlap[0], lora)


def _key(request: RouteRequest) -> SessionKey:
    return session_key(request.model, request.tenant, request.session)


def _room(pool: Pool | None, rules: RouterRules, now: float) -> tuple[bool, int]:
    """Return whether a worker has room for a prompt, and for how many requests a plan may be made to find it.

    While prefill workers are full, most requests wait for them, and a plan for each would find that out again.
    """
    if pool is None:
        return True, MAX_ASKED
    if not pool.prefillers:
        return has_room(pool.decoders, rules, now), MAX_ASKED
    if has_room(pool.prefillers, rules, now):
        return True, MAX_ASKED
    return has_room(pool.decoders, rules, now), FEW_ASKED


def _pending(request: RouteRequest, uncached_tokens: int, now: float, deadline_s: float) -> Pending[QueuedRequest]:
    return Pending(
        request_id=request.request_id,
        tenant=request.tenant,
        priority=request.priority,
        arrived_s=now,
        deadline_s=deadline_s,
        isl_tokens=request.isl_tokens,
        uncached_tokens=uncached_tokens,
        payload=QueuedRequest(request, now, deadline_s),
    )


def _placing(planned: PlacementPlan, deadline_s: float) -> Placing:
    """Return what is known of a request where a plan places it."""
    view, computes = planned.view, planned.first.chosen
    return Placing(
        view.request.model,
        view.request.max_tokens,
        deadline_s,
        max(0, view.request.isl_tokens - saved_tokens(computes, view)),
        computes.queued_tokens,
        planned.last.chosen.requests,
    )


def _hopeless(queued: QueuedRequest, now: float, retry_after_s: float) -> RefusedError:
    waited_s, left_s = now - queued.arrived_s, queued.deadline_s - now
    return RefusedError(
        "hopeless",
        f"it waited {waited_s:.1f} s, and would not be answered in the {left_s:.1f} s that are left",
        retry_after_s=retry_after_s,
    )


def _too_late(queued: QueuedRequest, now: float) -> DeadlineExceededError:
    return DeadlineExceededError(f"no worker was free in time: the request waited {now - queued.arrived_s:.1f} s")


def waiting_by_model(state: RouterState) -> dict[str, int]:
    """Return how many requests wait, by model. Another thread may ask."""
    return {model: len(queue) for model, queue in list(state._queues.items())}
