"""The router itself, as a pure state machine: cards, KV events and requests in, placements out.

The live service, a replayed trace and the tests drive this same object; time is a parameter. A request is submitted;
`dispatch` then places all that can be placed, in the order of the queue. It is to be called after anything that may let
a waiting request go: a submission, a first token, an end, a worker that came or left.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from protocol.errors import DeadlineExceededError, MeshError, NoWorkerError
from protocol.events import KvEvent
from protocol.ids import RequestId, WorkerId
from protocol.messages import Explanation, Placed, Role, RouteRequest, Target, WorkerCard
from router.affinity import SessionAffinity, session_key
from router.disaggregation import Backlog, LocalPrefill, decide
from router.explain import Leg, Reasons, explain
from router.index import Depths, Digest, Holder, PrefixIndex
from router.load import ActiveLoad, Change, HolderLoad, Owner, Share
from router.prediction import APPROXIMATE_TTL_S, ON_ROUTE_TTL_S, PredictedPrefixes
from router.pressure import BusyShare, PrefixDemand, WorkSpread, recompute_price
from router.queue import Pending, PendingQueue, QueueRules
from router.selection import NOWHERE, Candidate, Policy, Prompt, Weights, choose
from router.shortlist import Shelves
from router.warmup import WarmUp

RESERVE_AFTER_S = 5.0  # who has waited so long for a worker gets it before those who need less of it
FEW = 16  # of so many workers all are weighed: to choose whom to leave out takes as long
_HASH_BYTES = 8
_FOREVER = float("inf")
_PATIENT: frozenset[Policy] = frozenset(("kv", "least-loaded", "power-of-two"))  # those that look at load


@dataclass(frozen=True, slots=True)
class Saturation:
    """When a worker is given nothing more, and who comes waits in the router: there it can still be re-ordered, go to
    another worker, or be refused. Enough is left with the worker to keep it busy until the next one comes."""

    queued_tokens: int = 2048  # prompt tokens placed there, still to compute, for a capacity of 1
    requests_share: float = 1.0  # of the sequences that the worker runs at once
    blocks_share: float = 1.0  # of its KV blocks


@dataclass(frozen=True, slots=True)
class RouterRules:
    policy: Policy = "kv"
    weights: Weights = field(default_factory=Weights)
    recompute_price: float = 0.0  # 0: worked out from load and demand
    temperature: float = 0.0
    local_prefill: LocalPrefill = field(default_factory=LocalPrefill)
    saturation: Saturation | None = field(default_factory=Saturation)  # None: nobody waits in the router
    queue: QueueRules = field(default_factory=lambda: QueueRules(order="wspt"))
    affinity_ttl_s: float = 0.0  # 0: sessions are not bound to workers
    predict_ttl_s: float = ON_ROUTE_TTL_S  # 0: only what events tell is believed
    approximate_ttl_s: float = APPROXIMATE_TTL_S  # of predictions for workers without events
    lease_s: float = 120.0  # a booking of which nothing is heard ends
    ramp_s: float = 10.0
    suspect_s: float = 2.0  # a worker that failed a request is avoided for so long


class Outcome(NamedTuple):
    """What became of a request that was submitted: placed and booked, or failed."""

    request_id: RequestId
    result: Placed | MeshError


@dataclass(slots=True, eq=False)
class Slot:
    """One (worker, dp rank): a place where a request can run."""

    holder: Holder
    card: WorkerCard
    load: HolderLoad
    last_chosen: int = 0


@dataclass(slots=True, eq=False)
class _Pool:
    """All workers of one model."""

    index: PrefixIndex = field(default_factory=PrefixIndex)
    queue: PendingQueue["_Waiting"] = field(default_factory=PendingQueue)
    prefillers: list[Slot] = field(default_factory=list)
    decoders: list[Slot] = field(default_factory=list)  # those that do nothing else, then those that do both
    shelves: dict[Role, Shelves[Slot]] = field(default_factory=lambda: {role: Shelves() for role in Role})
    spread: WorkSpread = field(default_factory=WorkSpread)
    busy: dict[bool, BusyShare] = field(default_factory=lambda: {True: BusyShare(), False: BusyShare()})
    demand: PrefixDemand = field(default_factory=PrefixDemand)

    def slots_of(self, role: Role) -> list[Slot]:
        return self.prefillers if role is Role.PREFILL else self.decoders

    @property
    def slots(self) -> Iterator[Slot]:
        return chain(self.decoders, self.prefillers)


class _Waiting(Struct):
    request: RouteRequest
    arrived_s: float


class _Before(Struct):
    """What those that are served before a request, and have to wait themselves, leave for it."""

    tokens: dict[Holder, int] = {}  # that they wait to compute there
    reserved: set[Holder] = set()  # kept for those that have waited long

    def clear(self) -> None:
        self.tokens.clear()
        self.reserved.clear()


class _View(Struct):
    """What all candidates of one request are seen by."""

    request: RouteRequest
    block_size: int
    overlaps: Mapping[Holder, Depths]
    active: Mapping[Holder, int]
    before: _Before
    price: float
    busy_share: float
    asked_before: float


class _Plan(Struct):
    decode: Candidate
    prefill: Candidate | None
    reason: str
    is_full: bool  # nobody can take it now: it waits for these
    view: _View
    legs: list[Leg]

    @property
    def computes(self) -> Candidate:
        return self.prefill or self.decode


class RouterState:
    def __init__(self, rules: RouterRules, seed: int = 0) -> None:
        self.rules = rules
        self._rng = random.Random(seed)
        self._cards: dict[WorkerId, WorkerCard] = {}
        self._slots: dict[Holder, Slot] = {}
        self._pools: dict[str, _Pool] = {}
        self._suspect_until: dict[WorkerId, float] = {}
        self._choices = 0
        self._affinity = SessionAffinity(ttl_s=rules.affinity_ttl_s)
        self._predicted = PredictedPrefixes(ttl_s=rules.predict_ttl_s)
        self._approximate = PredictedPrefixes(ttl_s=rules.approximate_ttl_s)
        self._warm_up = WarmUp(ramp_s=rules.ramp_s)
        self.load = ActiveLoad(rules.lease_s)
        self._is_by_cost = rules.policy == "kv" and rules.temperature <= 0 and rules.weights.prefers_less
        self.stats: Counter[str] = Counter()  # expired: bookings that nobody freed

    # --- workers and what they tell ---------------------------------------------------------------

    @property
    def cards(self) -> Sequence[WorkerCard]:
        return list(self._cards.values())

    @property
    def waiting(self) -> int:
        return sum([len(pool.queue) for pool in self._pools.values()])

    @property
    def indexes(self) -> Mapping[str, PrefixIndex]:
        """By model."""
        return {model: pool.index for model, pool in self._pools.items()}

    def block_size_of(self, model: str) -> int:
        """1 for a model that nobody serves."""
        pool = self._pools.get(model)
        if pool is not None:
            for slot in pool.slots:
                return slot.card.block_size
        return 1

    def add_worker(self, card: WorkerCard, now: float = 0.0) -> None:
        """Take a worker in. Those of one model have one block size: router/members.py sees to it."""
        known = self._cards.get(card.worker_id)
        if known is not None and (known.model, known.role, known.dp_size) != (card.model, card.role, card.dp_size):
            self.remove_worker(card.worker_id, now)
            known = None
        self._cards[card.worker_id] = card
        pool = self._pool(card.model)
        for dp_rank in range(card.dp_size):
            holder = Holder(card.worker_id, dp_rank)
            if holder in self._slots:
                self._slots[holder].card = card
                self._shelve(self._slots[holder])
                continue
            self._slots[holder] = slot = Slot(holder, card, self.load.join(holder))
            slots = pool.slots_of(card.role)
            slots.append(slot)
            slots.sort(key=lambda s: (s.card.role is Role.AGGREGATED, s.holder))
            self._shelve(slot)
        if known is None:
            self._warm_up.joined(card.worker_id, now)

    def remove_worker(self, worker_id: WorkerId, now: float = 0.0) -> None:
        """Forget a worker with its blocks and its bookings. Unknown ones are no error."""
        card = self._cards.pop(worker_id, None)
        if card is None:
            return
        pool = self._pools[card.model]
        for dp_rank in range(card.dp_size):
            holder = Holder(worker_id, dp_rank)
            self._count_busy(self.load.leave(holder, now), now)
            pool.slots_of(card.role).remove(self._slots.pop(holder))
            pool.shelves[card.role].remove(holder)
        pool.index.drop_worker(worker_id)
        self._suspect_until.pop(worker_id, None)
        self._affinity.forget_worker(worker_id)
        self._predicted.forget_worker(worker_id)
        self._approximate.forget_worker(worker_id)
        self._warm_up.left(worker_id)
        self._tidy(card.model)

    def on_kv_events(self, worker_id: WorkerId, dp_rank: int, events: Iterable[KvEvent]) -> None:
        """What arrives after a worker has left must not bring it back."""
        if (card := self._cards.get(worker_id)) is not None:
            self._pools[card.model].index.apply(Holder(worker_id, dp_rank), events)
            self._predicted.forget_holder(Holder(worker_id, dp_rank))

    def on_kv_batch(self, worker_id: WorkerId, dp_rank: int, payload: bytes) -> int:
        """The same from a batch as on the wire; the number of events. Raises WireError."""
        if (card := self._cards.get(worker_id)) is None:
            return 0
        holder = Holder(worker_id, dp_rank)
        num_events = self._pools[card.model].index.apply_payload(holder, payload)
        self._predicted.forget_holder(holder)  # the events of what it has computed are among them
        return num_events

    def forget_kv(self, worker_id: WorkerId, dp_rank: int) -> None:
        """Whatever this holder was said to have: it is told anew."""
        if (card := self._cards.get(worker_id)) is not None:
            self._pools[card.model].index.drop(Holder(worker_id, dp_rank))

    def digest(self, worker_id: WorkerId, dp_rank: int) -> Digest | None:
        card = self._cards.get(worker_id)
        return None if card is None else self._pools[card.model].index.digest(Holder(worker_id, dp_rank))

    def overlaps(self, model: str, hashes: bytes, now: float) -> Mapping[Holder, Depths]:
        """How much of a prompt each holder has, or is about to have."""
        pool = self._pools.get(model)
        if pool is None:
            return {}
        found, _ = self._overlaps(pool, hashes, now)
        return {slot.holder: found[slot.holder] for slot in pool.slots if slot.holder in found}

    # --- requests ----------------------------------------------------------------------------------

    def submit(self, request: RouteRequest, now: float, deadline_s: float = _FOREVER) -> Sequence[Outcome]:
        """Let a request wait for `dispatch`. Returns those that it displaced from the queue.

        Raises NoWorkerError if there is no worker for it, OverloadedError if the queue is full.
        """
        self._suspect(request.exclude, now)
        pool, decoders, prefillers = self._who_may(request, now)
        overlaps, _ = self._overlaps(pool, request.sequence_hashes, now)
        cached = max(self._depths(pool, overlaps, prefillers or decoders), default=0) * decoders[0].card.block_size
        pending = Pending(
            request_id=request.request_id,
            tenant=request.tenant,
            priority=request.priority,
            arrived_s=now,
            deadline_s=deadline_s,
            isl_tokens=request.isl_tokens,
            uncached_tokens=max(0, request.isl_tokens - cached),
            payload=_Waiting(request, now),
        )
        displaced = pool.queue.push(pending, now)
        return [Outcome(other.request_id, pool.queue.refusal(now)) for other in displaced]

    def dispatch(self, now: float) -> list[Outcome]:
        """Place what can be placed now, and fail what can no longer be served in time."""
        outcomes: list[Outcome] = []
        self._forgive(now)
        for model, pool in list(self._pools.items()):
            if pool.queue:
                outcomes += self._dispatch(pool, now)
            self._tidy(model)
        return outcomes

    def next_deadline(self) -> float | None:
        """When `dispatch` is to be called at the latest: somebody gives up, or may go to who is trusted again."""
        deadlines = [deadline for pool in self._pools.values() if (deadline := pool.queue.next_deadline()) is not None]
        return min([*deadlines, *self._suspect_until.values()]) if deadlines else None

    def try_place(self, request: RouteRequest, now: float) -> Placed | None:
        """In one step what `submit` and `dispatch` come to for a request that comes alone while nobody waits.

        None: it has to wait; `submit` it. Raises NoWorkerError.
        """
        if request.exclude or self._suspect_until:
            self._suspect(request.exclude, now)
        pool = self._pools.get(request.model)
        if pool is not None and (pool.queue or not self._has_room(pool, now)):
            return None
        plan = self._plan(request, now, _Before())
        return None if plan.is_full else self._book(plan, now, waited_s=0.0)

    def place(self, request: RouteRequest, now: float) -> Placed:
        """Place and book at once, whoever waits and however full the workers are. Raises NoWorkerError."""
        self._suspect(request.exclude, now)
        return self._book(self._plan(request, now, _Before()), now, waited_s=0.0)

    def preview(self, request: RouteRequest, now: float) -> Placed:
        """Where it would run if it came now, with the explanation; nothing is booked or remembered.

        Raises NoWorkerError.
        """
        draws = self._rng.getstate()
        try:
            plan = self._plan(request, now, _Before(), all_weighed=True)
        finally:
            self._rng.setstate(draws)
        waits = plan.is_full or bool(self._pools[request.model].queue)
        return self._placed(plan, replace(self._explain(plan), would_wait=waits))

    def resume(self, request: RouteRequest, placed: Placed, now: float, *, is_prefilling: bool) -> None:
        """Book again what a router placed that is gone: the request runs where that one said.

        Raises NoWorkerError if its workers are not known here, or not yet.
        """
        prefill = (placed.prefill if is_prefilling else None) or placed.decode
        holders = [Holder(target.worker_id, target.dp_rank) for target in (placed.decode, prefill)]
        for holder in holders:
            if holder not in self._slots:
                raise NoWorkerError(f"no worker {holder.worker_id!r} with a rank {holder.dp_rank} is known here")
        cached = prefill.overlap_blocks * self._slots[holders[1]].card.block_size
        changes = self.load.book(
            request.request_id,
            decode=holders[0],
            prefill=holders[1],
            prefill_tokens=max(0, request.isl_tokens - cached) if is_prefilling else 0,
            hashes=request.sequence_hashes,
            owner=Owner(request.tenant, request.priority),
            now=now,
        )
        self._count_busy(changes, now)
        self._approximate_all(request, holders, now)
        if not is_prefilling:
            self.prefill_done(request.request_id, now)

    def prefill_done(self, request_id: RequestId, now: float = 0.0) -> None:
        """Its first token is there. Its blocks are too, of which events will soon tell."""
        holders, hashes = self.load.holders_of(request_id), self.load.hashes_of(request_id)
        for holder in holders if self.rules.predict_ttl_s else ():
            card = self._slots[holder].card
            if card.kv_events:
                self._predicted.placed(request_id, holder, hashes, now, card.total_blocks)
        for holder in holders[1:]:  # the prefill worker is done with it
            self._warm_up.completed(holder.worker_id)
        self._count_busy(self.load.prefill_done(request_id, now), now)

    def progress(self, request_id: RequestId, osl_tokens: int, now: float) -> None:
        """It lives, and has so many tokens by now."""
        holders = self.load.holders_of(request_id)
        if holders:
            card = self._slots[holders[0]].card
            grown = self.load.progress(request_id, 1 + osl_tokens // card.block_size, now)
            tenant, priority = self.load.owner_of(request_id)
            self._pools[card.model].queue.charge(tenant, grown * card.block_size, priority)

    def free(self, request_id: RequestId, now: float = 0.0, *, ok: bool = True) -> None:
        """It has ended, wherever it was; `ok`: well. A second call does nothing."""
        for model, pool in self._pools.items():
            if pool.queue and pool.queue.cancel(request_id) is not None:
                self._tidy(model)
                break
        for holder in self.load.holders_of(request_id):
            if ok:
                self._warm_up.completed(holder.worker_id)
        if not ok:
            self._predicted.forget(request_id)
            self._approximate.forget(request_id)
        self._count_busy(self.load.free(request_id, now), now)

    def expire(self, now: float) -> list[RequestId]:
        """End bookings of which nothing was heard for too long: whoever held them is gone."""
        expired = self.load.expired(now)
        for request_id in expired:
            self.free(request_id, now, ok=False)
        self.stats["expired"] += len(expired)
        return expired

    def set_elsewhere(self, router: str, shares: Mapping[Holder, Share]) -> None:
        """All the load that another router has placed."""
        self.load.set_elsewhere(router, shares)

    # --- how it is decided -------------------------------------------------------------------------

    def _dispatch(self, pool: _Pool, now: float) -> list[Outcome]:
        outcomes = [Outcome(p.request_id, _too_late(p.payload, now)) for p in pool.queue.expire(now)]
        before = _Before()
        plans: dict[RequestId, _Plan | MeshError] = {}
        has_room = self._has_room(pool, now)

        def fits(item: Pending[_Waiting]) -> bool:
            plan = self._try_plan(item.payload.request, now, before, has_room)
            if plan is None:
                return False
            plans[item.request_id] = plan
            if isinstance(plan, MeshError) or not plan.is_full:
                return True
            if plan.legs[0].is_full:
                holder = plan.computes.holder
                before.tokens[holder] = before.tokens.get(holder, 0) + item.uncached_tokens
            if now - item.payload.arrived_s > RESERVE_AFTER_S and self._is_packed(plan.decode):
                before.reserved.add(plan.decode.holder)
            return False

        while (item := pool.queue.pop_next(now, fits)) is not None:
            plan = plans[item.request_id]
            if isinstance(plan, MeshError):
                outcomes.append(Outcome(item.request_id, plan))
            else:
                outcomes.append(Outcome(item.request_id, self._book(plan, now, now - item.payload.arrived_s)))
            if not pool.queue:
                break
            before.clear()
            has_room = self._has_room(pool, now)
        return outcomes

    def _has_room(self, pool: _Pool, now: float) -> bool:
        """Whether anybody may be given a prompt to compute: if not, no plan has to be made."""
        limits = self.rules.saturation
        if limits is None or self.rules.policy not in _PATIENT:
            return True
        for slot in pool.slots:
            load, most_tokens = slot.load, limits.queued_tokens * slot.card.capacity
            queued_tokens = load.total.queued_tokens
            if queued_tokens < most_tokens or queued_tokens - load.done_tokens(now) < most_tokens:
                return True
        return False

    def _try_plan(self, request: RouteRequest, now: float, before: _Before, has_room: bool) -> _Plan | MeshError | None:
        """None: it waits. Who can never be served is told so, however full the workers are."""
        try:
            if has_room:
                return self._plan(request, now, before)
            self._who_may(request, now)
            return None
        except MeshError as error:
            return error

    def _who_may(self, request: RouteRequest, now: float) -> tuple[_Pool, Sequence[Slot], Sequence[Slot]]:
        """Those that may decode it, at least one, and those that may prefill it. Raises NoWorkerError."""
        pool = self._pools.get(request.model)
        decoders = [] if pool is None else self._eligible(pool.decoders, request, now, request.pin, request.pin_rank)
        if pool is None or not decoders:
            raise NoWorkerError(self._why_none(request), hint="start one: `kvmesh up`, or `python -m workers`")
        prefillers = pool.prefillers and self._eligible(pool.prefillers, request, now, request.pin_prefill)
        if request.pin_prefill is not None and not prefillers:
            raise NoWorkerError(f"no prefill worker {request.pin_prefill!r} is ready", hint="see `GET /workers`")
        return pool, decoders, prefillers

    def _plan(self, request: RouteRequest, now: float, before: _Before, *, all_weighed: bool = False) -> _Plan:
        """Where a request would run if it were placed now; `all_weighed`: it is to be explained.

        Raises NoWorkerError.
        """
        pool, decoders, prefillers = self._who_may(request, now)
        overlaps, active = self._overlaps(pool, request.sequence_hashes, now)
        num_slots = len(decoders) + len(prefillers)
        if num_slots > FEW and not (all_weighed or request.explain) and self._may_shorten(request, now):
            bound = self._bound_to(request, now)
            apart = {*overlaps, *before.tokens, *before.reserved, *(() if bound is None else (bound,))}
            if 2 * len(apart) < num_slots:
                decoders, prefillers = self._shortlists(pool, apart)
        view = self._view(pool, request, prefillers or decoders, overlaps, active, now, before)
        local = self._choose("whole", decoders, view, now)
        first = self._choose("prefill", prefillers, view, now) if prefillers else None
        wish = True if request.pin_prefill is not None else request.disaggregate
        decision = decide(
            request.isl_tokens,
            local.chosen.overlap[0] * view.block_size,
            first is not None,
            wish,
            self.rules.local_prefill,
            None if first is None else self._backlog(first, local, view),
        )
        if first is None or not decision.disaggregate:
            return self._one(local, decision.reason, view)
        transfer = self._slots[first.chosen.holder].card.transfer
        compatible = [slot for slot in decoders if transfer and slot.card.transfer == transfer]
        if not compatible:
            problem = f"no decode worker can pull KV over {transfer!r}"
            if request.pin_prefill is not None:
                raise NoWorkerError(f"{problem} from {request.pin_prefill!r}", hint="start both with one --kv-transfer")
            return self._one(local, problem, view)
        second = self._choose("decode", compatible, view, now)
        if second.is_full and not local.is_full and not wish:
            return self._one(local, "no decode worker that could pull KV has room", view)
        is_full = first.is_full or second.is_full
        return _Plan(second.chosen, first.chosen, decision.reason, is_full, view, [first, second])

    def _one(self, local: Leg, reason: str, view: _View) -> _Plan:
        return _Plan(local.chosen, None, reason, local.is_full, view, [local])

    def _backlog(self, first: Leg, local: Leg, view: _View) -> Backlog:
        def until_done(c: Candidate) -> float:
            missing = max(0, view.request.isl_tokens - c.overlap[0] * view.block_size)
            return (c.queued_tokens + missing) / c.capacity

        return Backlog(until_done(first.chosen), until_done(local.chosen), first.is_full)

    def _may_shorten(self, request: RouteRequest, now: float) -> bool:
        """Whether those that cannot be the cheapest may be left out: all workers are asked, and by cost alone."""
        is_for_all = not (request.lora or request.exclude or request.pin or request.pin_prefill)
        return is_for_all and self._is_by_cost and not self._suspect_until and self._warm_up.is_over(now)

    def _shortlists(self, pool: _Pool, apart: Collection[Holder]) -> tuple[Sequence[Slot], Sequence[Slot]]:
        """Those to weigh that may decode, and those that may prefill."""
        for holder in self.load.take_moved():
            self._shelve(self._slots[holder])
        decode, aggregated, prefill = (
            pool.shelves[role].shortlist(apart) for role in (Role.DECODE, Role.AGGREGATED, Role.PREFILL)
        )
        return decode + aggregated, prefill

    def _shelve(self, slot: Slot) -> None:
        card, load = slot.card, slot.load.total
        free_of_charge = (load.held_blocks, load.requests) if card.role is Role.PREFILL else ()  # so more is not worse
        kind = (card.capacity, card.max_num_seqs, card.total_blocks, card.transfer, free_of_charge)
        self._pools[card.model].shelves[card.role].put(slot.holder, slot, kind, load, slot.last_chosen)

    def _view(
        self,
        pool: _Pool,
        request: RouteRequest,
        computing: Sequence[Slot],
        overlaps: Mapping[Holder, Depths],
        active: Mapping[Holder, int],
        now: float,
        before: _Before,
    ) -> _View:
        hashes = request.sequence_hashes
        is_prefill = computing[0].card.role is Role.PREFILL
        if told := self.load.take_told():
            self._count_busy(told, now)
        busy = pool.busy[is_prefill].of(len(pool.prefillers if is_prefill else pool.decoders), now)
        depths = self._depths(pool, overlaps, computing)
        deepest = max(depths, default=0)
        asked = pool.demand.of(_prefix(hashes, deepest), now) if deepest else 0.0
        price = self.rules.recompute_price or recompute_price(
            busy, pool.spread.value, asked, depths.count(deepest) if deepest else 0
        )
        return _View(request, computing[0].card.block_size, overlaps, active, before, price, busy, asked)

    def _overlaps(self, pool: _Pool, hashes: bytes, now: float) -> tuple[Mapping[Holder, Depths], Mapping[Holder, int]]:
        """What a holder has, what requests in flight there will have made, and what events are still to tell of; and
        of these the second alone. Workers of other models may be among them."""
        if not hashes:
            return {}, {}
        found, active = pool.index.match(hashes), self.load.chains.match(hashes)
        if self.rules.predict_ttl_s:
            _deepen(found, active)
            if self.load.prefilling.num_blocks:
                _deepen(found, self.load.prefilling.match(hashes))
        for predictions in (self._predicted, self._approximate):
            if len(predictions):
                _deepen(found, predictions.match(hashes, now))
        return found, active

    def _depths(self, pool: _Pool, overlaps: Mapping[Holder, Depths], slots: Sequence[Slot]) -> list[int]:
        """Of those of `slots` that have a part of a prompt: how much, in blocks, wherever it lies there."""
        if not overlaps:
            return []
        if slots is pool.prefillers:
            asked = pool.shelves[Role.PREFILL]
            return [depths[-1] for holder, depths in overlaps.items() if holder in asked]
        if slots is pool.decoders:
            one, other = pool.shelves[Role.DECODE], pool.shelves[Role.AGGREGATED]
            return [depths[-1] for holder, depths in overlaps.items() if holder in one or holder in other]
        holders = {slot.holder for slot in slots}
        return [depths[-1] for holder, depths in overlaps.items() if holder in holders]

    def _choose(self, leg: str, slots: Sequence[Slot], view: _View, now: float) -> Leg:
        """Who is to take it; if that one is full, the request waits for it.

        A worker that has more of the prompt than the others is worth waiting for until it has computed what is queued
        there, if the others cost more. Else nobody waits while someone has room.
        """
        rules, request = self.rules, view.request
        prompt = Prompt(request.isl_tokens, view.block_size, leg, rules.weights, view.price)  # type: ignore[arg-type]
        candidates = self._candidates(slots, view, now)
        passed_over = self._held_back(candidates, now) if len(self._warm_up) else {}
        bound_to = self._bound_to(request, now) if request.session else None
        bound = None if bound_to is None else next((c for c in candidates if c.holder == bound_to), None)
        reserved = view.before.reserved
        if bound is not None and not self._is_full(bound, leg, reserved):
            return Leg(leg, bound, False, "its session runs there", prompt, candidates, passed_over)
        allowed = [c for c in candidates if c.holder not in passed_over] if passed_over else candidates
        chosen = choose(allowed, prompt, rules.policy, rules.temperature, self._rng)
        is_full = rules.policy in _PATIENT and self._is_full(chosen, leg, reserved)
        if is_full and (others := [c for c in allowed if not self._is_full(c, leg, reserved)]):
            other = choose(others, prompt, rules.policy, rules.temperature, self._rng)
            is_far_off = self._is_packed(chosen, reserved)
            if rules.policy != "kv" or is_far_off or chosen.overlap[-1] <= other.overlap[-1]:
                open_now = {c.holder for c in others}
                passed_over |= {c.holder: "full" for c in allowed if c.holder not in open_now}
                chosen, is_full = other, False
        return Leg(leg, chosen, is_full, "", prompt, candidates, passed_over)

    def _held_back(self, candidates: Sequence[Candidate], now: float) -> dict[Holder, str]:
        in_flight = {c.holder: c.requests or len(self._slots[c.holder].load.prefilling) for c in candidates}
        return dict.fromkeys(self._warm_up.held_back(in_flight, now), "new: held back")

    def _candidates(self, slots: Sequence[Slot], view: _View, now: float) -> list[Candidate]:
        overlaps, active, ahead = view.overlaps, view.active, view.before.tokens
        num_blocks = len(view.request.sequence_hashes) // _HASH_BYTES
        found: list[Candidate] = []
        for slot in slots:
            holder, load = slot.holder, slot.load
            queued, held, requests = load.total
            if load.prefilling:
                queued -= load.done_tokens(now)
            if ahead:
                queued += ahead.get(holder, 0)
            found.append(
                Candidate(
                    holder,
                    overlaps.get(holder, NOWHERE),
                    queued,
                    held,
                    num_blocks - active.get(holder, 0),
                    requests,
                    slot.card.capacity,
                    slot.last_chosen,
                )
            )
        return found

    def _is_full(self, c: Candidate, leg: str, reserved: Collection[Holder]) -> bool:
        limits = self.rules.saturation
        if limits is None:
            return False
        if leg != "decode" and c.queued_tokens >= limits.queued_tokens * c.capacity:
            return True
        return self._is_packed(c, reserved)

    def _is_packed(self, c: Candidate, reserved: Collection[Holder] = ()) -> bool:
        """It has no sequence or no blocks to spare until an answer ends, which may be far off."""
        limits = self.rules.saturation
        if limits is None:
            return False
        if c.holder in reserved:
            return True
        if not c.requests:  # a prefill worker has none
            return False
        card = self._slots[c.holder].card
        if c.requests >= limits.requests_share * card.max_num_seqs:
            return True
        return c.held_blocks + c.new_blocks > limits.blocks_share * card.total_blocks

    def _bound_to(self, request: RouteRequest, now: float) -> Holder | None:
        """Where its session runs."""
        if not request.session or not self.rules.affinity_ttl_s:
            return None
        return self._affinity.get(session_key(request.model, request.tenant, request.session), now)

    def _eligible(
        self, slots: Sequence[Slot], request: RouteRequest, now: float, pin: str | None, pin_rank: int | None = None
    ) -> Sequence[Slot]:
        """Where this request may go. To suspects only if there is nobody else."""
        if request.lora is not None:
            slots = [slot for slot in slots if request.lora in slot.card.loras]
        if request.exclude or pin is not None:
            slots = [
                slot
                for slot in slots
                if slot.card.worker_id not in request.exclude
                and (pin is None or pin in (slot.card.worker_id, slot.card.name))
                and (pin is None or pin_rank is None or slot.holder.dp_rank == pin_rank)
            ]
        if not self._suspect_until:
            return slots
        trusted = [slot for slot in slots if self._suspect_until.get(slot.card.worker_id, 0.0) <= now]
        return trusted or slots

    def _suspect(self, workers: Sequence[WorkerId], now: float) -> None:
        self._forgive(now)
        for worker_id in workers:
            if worker_id in self._cards:
                self._suspect_until[worker_id] = now + self.rules.suspect_s

    def _forgive(self, now: float) -> None:
        if self._suspect_until:
            for worker_id in [known for known, until in self._suspect_until.items() if until <= now]:
                del self._suspect_until[worker_id]

    # --- booking -----------------------------------------------------------------------------------

    def _book(self, plan: _Plan, now: float, waited_s: float) -> Placed:
        request, view, computes = plan.view.request, plan.view, plan.computes
        uncached = max(0, request.isl_tokens - computes.overlap[-1] * view.block_size)
        changes = self.load.book(
            request.request_id,
            decode=plan.decode.holder,
            prefill=computes.holder,
            prefill_tokens=uncached,
            hashes=request.sequence_hashes,
            owner=Owner(request.tenant, request.priority),
            now=now,
        )
        self._count_busy(changes, now)
        self._pools[request.model].spread.add(uncached)
        chosen = [plan.decode] if plan.prefill is None else [plan.decode, plan.prefill]
        for candidate in chosen:
            self._choices += 1
            self._slots[candidate.holder].last_chosen = self._choices
        self._approximate_all(request, [candidate.holder for candidate in chosen], now)
        self._remember(request, plan, now)
        return self._placed(plan, self._explain(plan, waited_s) if request.explain else None)

    def _placed(self, plan: _Plan, explanation: Explanation | None) -> Placed:
        prefill = None if plan.prefill is None else self._target(plan.prefill)
        return Placed(decode=self._target(plan.decode), prefill=prefill, reason=plan.reason, explanation=explanation)

    def _explain(self, plan: _Plan, waited_s: float = 0.0) -> Explanation:
        view = plan.view
        reasons = Reasons(
            self.rules.policy,
            self.rules.temperature,
            plan.reason,
            view.price,
            view.busy_share,
            view.asked_before,
            waited_s,
            plan.legs,
        )
        return explain(reasons, lambda holder: self._slots[holder].card.name)

    def _approximate_all(self, request: RouteRequest, holders: Iterable[Holder], now: float) -> None:
        """Remember what those workers will cache that do not tell it themselves."""
        for holder in holders:
            card = self._slots[holder].card
            if not card.kv_events and self.rules.approximate_ttl_s:
                hashes = request.sequence_hashes
                self._approximate.placed(request.request_id, holder, hashes, now, card.total_blocks)

    def _remember(self, request: RouteRequest, plan: _Plan, now: float) -> None:
        if request.session and self.rules.affinity_ttl_s:
            self._affinity.bind(session_key(request.model, request.tenant, request.session), plan.decode.holder, now)
        computing = plan.legs[0].candidates
        deepest = max([c.overlap[-1] for c in computing])
        if deepest and not request.exclude:
            self._pools[request.model].demand.asked(_prefix(request.sequence_hashes, deepest), now)

    def _count_busy(self, changes: Sequence[Change], now: float) -> None:
        for change in changes:
            card = self._cards.get(change.holder.worker_id) or self._slots[change.holder].card
            self._pools[card.model].busy[card.role is Role.PREFILL].change(1 if change.is_busy else -1, now)

    def _pool(self, model: str) -> _Pool:
        if (pool := self._pools.get(model)) is None:
            pool = self._pools[model] = _Pool(queue=PendingQueue(self.rules.queue))
        return pool

    def _tidy(self, model: str) -> None:
        """A model that nobody serves, and nobody waits for, is not remembered."""
        pool = self._pools[model]
        if not (pool.decoders or pool.prefillers or pool.queue):
            del self._pools[model]

    def _target(self, chosen: Candidate) -> Target:
        card = self._slots[chosen.holder].card
        return Target(
            worker_id=card.worker_id,
            name=card.name,
            address=card.address,
            dp_rank=chosen.holder.dp_rank,
            overlap_blocks=chosen.overlap[0],
        )

    def _why_none(self, request: RouteRequest) -> str:
        wanted = repr(request.model) if request.lora is None else f"{request.model!r} with the adapter {request.lora!r}"
        serving = [card for card in self._cards.values() if card.model == request.model]
        mine = [card for card in serving if request.lora is None or request.lora in card.loras]
        able = sorted(card.name for card in mine if card.role is not Role.PREFILL)
        if request.pin is not None:
            pinned = [c for c in mine if c.role is not Role.PREFILL and request.pin in (c.worker_id, c.name)]
            ranks = max((card.dp_size for card in pinned), default=0)
            if request.pin_rank is not None and 0 < ranks <= request.pin_rank:
                return f"the worker {request.pin!r} has no rank {request.pin_rank}; it has {ranks}, counted from 0"
            if pinned and all(card.worker_id in request.exclude for card in pinned):
                return f"the worker {request.pin!r} has failed this request"
            return f"no decode worker {request.pin!r} serves {wanted}; there are: {', '.join(able) or 'none'}"
        if request.exclude and able:
            return f"every worker of the model {wanted} that could decode has failed this request"
        if request.lora is not None and not able:
            adapters = sorted({name for card in serving if card.role is not Role.PREFILL for name in card.loras})
            return f"no worker that decodes the model {wanted} is ready; adapters: {', '.join(adapters) or 'none'}"
        roles = sorted(card.role for card in mine)
        return f"no worker that decodes the model {wanted} is ready; there are: {', '.join(roles) or 'none'}"


def _prefix(hashes: bytes, blocks: int) -> bytes:
    """The name of the prefix that ends with that block."""
    return hashes[(blocks - 1) * _HASH_BYTES : blocks * _HASH_BYTES]


def _deepen(found: dict[Holder, Depths], predicted: Mapping[Holder, int]) -> None:
    """What is about to be on a device counts as if it were there."""
    for holder, depth in predicted.items():
        known = found.get(holder)
        if known is None or known[0] < depth:
            found[holder] = (depth, depth, depth, depth) if known is None else tuple(max(d, depth) for d in known)  # type: ignore[assignment]


def _too_late(waiting: _Waiting, now: float) -> DeadlineExceededError:
    return DeadlineExceededError(f"no worker was free in time: the request waited {now - waiting.arrived_s:.1f} s")
