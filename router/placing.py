"""Plan where a request runs. Pure functions of the fleet, its load and the rules: nothing is booked here.

`look` gathers the facts for one request: which workers may take it, what they hold of its prompt, and what recomputing
costs now. `plan` chooses by them a worker for the whole request, or one for each leg.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from random import Random

from msgspec import Struct

from kvmesh.protocol.errors import NoWorkerError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import PrefixSource, Role, RouteRequest, WorkerCard
from kvmesh.router.disaggregation import Backlog, decide
from kvmesh.router.estimate import ServiceTimes
from kvmesh.router.fleet import Pool, Slot, WorkerFleet
from kvmesh.router.index import Depths, Holder
from kvmesh.router.pairing import Apart, is_unknown, may_continue, partners, why_apart
from kvmesh.router.peers import PeerKind, PeerSource, deepest, kind_of, pull_of
from kvmesh.router.policies import POLICIES, choose
from kvmesh.router.pressure import recompute_price
from kvmesh.router.refusal import no_worker
from kvmesh.router.rules import RouterRules
from kvmesh.router.selection import NOWHERE, Candidate, LegKind, PeerPull, PlacementCost, Weights, saved_blocks

FEW = 16  # up to this number, scoring every worker is as fast as shortlisting
_HASH_BYTES = 8


class Ahead(Struct):
    """Room that is kept for requests that are served before a request, and have to wait themselves."""

    tokens: dict[Holder, int] = {}  # that they will compute there
    reserved: set[Holder] = set()  # kept for requests that have waited long

    def clear(self) -> None:
        self.tokens.clear()
        self.reserved.clear()


NOTHING_AHEAD = Ahead()


class RequestView(Struct):
    """Facts about the request that every candidate is scored with."""

    fleet: WorkerFleet
    pool: Pool
    rules: RouterRules
    request: RouteRequest
    now: float
    ahead: Ahead
    rng: Random
    bound_to: Holder | None  # where its session runs
    decoders: Sequence[Slot]  # at least one
    prefillers: Sequence[Slot]
    held_back: Collection[Holder]  # newcomers that may take no further request now; never all that may take a leg
    block_size: int
    overlaps: Mapping[Holder, Depths]
    active: Mapping[Holder, int]
    price: float
    busy_share: float
    asked_before: float
    times: ServiceTimes | None
    sources: Mapping[PeerKind, PeerSource]  # from where workers of each kind could pull the prompt's beginning


class LegChoice(Struct):
    """The worker chosen for one leg of a request, with the candidates it was chosen from."""

    kind: LegKind
    chosen: Candidate
    is_full: bool
    why: str  # "": by the policy
    cost: PlacementCost
    candidates: Sequence[Candidate]
    passed_over: Mapping[Holder, str]  # candidates that the policy could not choose, and why


class PlacementPlan(Struct):
    """A choice of workers for a request, if it were placed now. One worker: both legs are the same."""

    first: LegChoice  # computes the prompt
    last: LegChoice  # decodes
    reason: str  # why one worker or two
    view: RequestView
    apart: Apart | None = None  # decode workers that the prefill worker was not paired with
    is_unknown: bool = False  # one of two workers does not say what its KV is computed with

    @property
    def legs(self) -> Sequence[LegChoice]:
        return [self.first] if self.first is self.last else [self.first, self.last]

    @property
    def is_full(self) -> bool:
        """True if the request has to wait for the chosen workers."""
        return self.first.is_full or self.last.is_full


def look(
    fleet: WorkerFleet,
    rules: RouterRules,
    request: RouteRequest,
    now: float,
    rng: Random,
    ahead: Ahead = NOTHING_AHEAD,
    bound_to: Holder | None = None,
    scores_all: bool = False,
    times: ServiceTimes | None = None,
) -> RequestView:
    """Return the view that a request is placed by. Raises NoWorkerError.

    ahead: what is kept for requests before it. bound_to: where its session runs. scores_all: the plan is to be
    explained, so workers that cannot be the cheapest are scored too. times: what requests for its model took.
    """
    pool = fleet.pools.get(request.model)
    hashes = request.sequence_hashes
    shortened = None
    scores_all = scores_all or request.explain
    if pool is not None and pool.decoders and not scores_all and _may_shorten(pool, rules, request):
        overlaps, active = fleet.find(pool, hashes, now)
        apart = {*overlaps, *ahead.tokens, *ahead.reserved, *(() if bound_to is None else (bound_to,))}
        shortened = fleet.shortlists(pool, apart, now)
    if shortened is None or pool is None:
        pool, decoders, prefillers = who_may(fleet, request, now)
        overlaps, active = fleet.find(pool, hashes, now)
        held_back: Collection[Holder] = [*fleet.held_back(decoders, now), *fleet.held_back(prefillers, now)]
    else:
        decoders, prefillers, held_back = shortened
    computing = prefillers or decoders
    if prefillers:
        busy = pool.prefill_busy.of(len(pool.prefillers), now)
    else:
        busy = pool.decode_busy.of(len(pool.decoders), now)
    depths = cached_blocks(pool, overlaps, computing)
    deepest = max(depths, default=0)
    asked = pool.demand.of(prefix_of(hashes, deepest), now) if deepest else 0.0
    holders = depths.count(deepest) if deepest else 0
    price = rules.recompute_price or recompute_price(busy, pool.spread.value, asked, holders)
    block_size = computing[0].card.block_size
    return RequestView(
        fleet, pool, rules, request, now, ahead, rng, bound_to, decoders, prefillers, held_back, block_size, overlaps,
        active, price, busy, asked, times, _sources(fleet, pool, rules, request, overlaps, now),
    )  # fmt: skip


def plan(view: RequestView) -> PlacementPlan:
    """Return where the request would run if it were placed now.

    Raises NoWorkerError if no decode worker can follow the prefill worker that the caller has pinned.
    """
    request = view.request
    whole = _choose_leg("whole", view.decoders, view)
    prefill = _choose_leg("prefill", view.prefillers, view) if view.prefillers else None
    decision = decide(
        request.isl_tokens,
        saved_tokens(whole.chosen, view),
        prefill is not None,
        _wish(request),
        view.rules.local_prefill,
        None if prefill is None else _backlog(prefill, whole, view),
    )
    if prefill is None or not decision.disaggregate:
        return PlacementPlan(whole, whole, decision.reason, view)
    return _paired(prefill, whole, decision.reason, view)


def source_of(planned: PlacementPlan) -> PrefixSource | None:
    """Return from where the worker that computes the prompt pulls its beginning."""
    if (pull := planned.first.chosen.pull) is None:
        return None
    card = planned.view.fleet.slots[pull.source].card
    return PrefixSource(
        worker_id=card.worker_id,
        name=card.name,
        address=card.address,
        dp_rank=pull.source.dp_rank,
        blocks=pull.blocks,
    )


def who_may(fleet: WorkerFleet, request: RouteRequest, now: float) -> tuple[Pool, Sequence[Slot], Sequence[Slot]]:
    """Return the pool of the request's model, and the slots that may decode and that may prefill the request.

    At least one slot may decode it. Raises NoWorkerError.
    """
    pool = fleet.pools.get(request.model)
    decoders: Sequence[Slot] = ()
    if pool is not None:
        decoders = _eligible(fleet, _allowed(pool, request), request, now, request.pin, request.pin_rank)
    if pool is None or not decoders:
        raise no_worker(fleet.cards, request)
    prefillers = pool.prefillers and _eligible(fleet, pool.prefillers, request, now, request.pin_prefill)
    if prefillers and not (_wish(request) or _is_trusted(fleet, prefillers[0], now)):
        prefillers = ()  # no other is left, and a worker that decodes can compute the prompt
    if request.pin_prefill is not None and not prefillers:
        raise NoWorkerError(f"no prefill worker {request.pin_prefill!r} is ready", hint="see `GET /workers`")
    return pool, decoders, prefillers


def _allowed(pool: Pool, request: RouteRequest) -> Sequence[Slot]:
    """Return the slots that decode, without those that the caller leaves out."""
    if request.among is None:
        return pool.decoders
    allowed = frozenset(request.among)
    return [slot for slot in pool.decoders if slot.card.worker_id in allowed]


def cached_blocks(pool: Pool, overlaps: Mapping[Holder, Depths], slots: Sequence[Slot]) -> list[int]:
    """Return how many leading blocks of the prompt each slot holds, in any tier. Slots without any are left out."""
    return [overlaps[holder][-1] for holder in _among(pool, overlaps, slots)]


def most_saved_tokens(
    fleet: WorkerFleet, pool: Pool, overlaps: Mapping[Holder, Depths], slots: Sequence[Slot], weights: Weights
) -> int:
    """Return how many tokens of the prompt need not be computed on the slot that has most of it."""
    saved = [
        saved_blocks(overlaps[holder], fleet.slots[holder].savings, weights) for holder in _among(pool, overlaps, slots)
    ]
    return int(max(saved, default=0.0) * slots[0].card.block_size)


def saved_tokens(c: Candidate, view: RequestView) -> int:
    """Return how many tokens of the prompt need not be computed there.

    A block in a lower tier, or one to be pulled from a peer, counts for less.
    """
    if c.pull is not None:
        return int(max(0.0, c.pull.blocks - c.pull.work) * view.block_size)
    return int(saved_blocks(c.overlap, c.savings, view.rules.weights) * view.block_size)


def _among(pool: Pool, overlaps: Mapping[Holder, Depths], slots: Sequence[Slot]) -> list[Holder]:
    """Return the holders of a part of the prompt that are among the slots."""
    if not overlaps:
        return []
    if slots is pool.prefillers:
        asked = pool.shelves[Role.PREFILL]
        return [holder for holder in overlaps if holder in asked]
    if slots is pool.decoders:
        one, other = pool.shelves[Role.DECODE], pool.shelves[Role.AGGREGATED]
        return [holder for holder in overlaps if holder in one or holder in other]
    holders = {slot.holder for slot in slots}
    return [holder for holder in overlaps if holder in holders]


def prefix_of(hashes: bytes, blocks: int) -> bytes:
    """Return the name of the prefix of so many blocks: the sequence hash of its last block."""
    return hashes[(blocks - 1) * _HASH_BYTES : blocks * _HASH_BYTES]


def has_room(slots: Iterable[Slot], rules: RouterRules, now: float) -> bool:
    """Return whether any of the workers may be given a prompt to compute. If none may, no plan has to be made."""
    limits = rules.saturation
    if limits is None or not rules.waits_for_room:
        return True
    for slot in slots:
        load, most_tokens = slot.load, limits.queued_tokens * slot.card.capacity
        queued_tokens = load.total.queued_tokens
        if queued_tokens < most_tokens or queued_tokens - load.done_tokens(now) < most_tokens:
            return True
    return False


def running_on(pool: Pool | None) -> float | None:
    """Return the sequences on a worker that decodes, on average; None without workers."""
    if pool is None or not pool.decoders:
        return None
    return sum([slot.load.total.requests for slot in pool.decoders]) / len(pool.decoders)


def is_packed(c: Candidate, view: RequestView, reserved: Collection[Holder] = ()) -> bool:
    """Return whether a worker has no sequence or no blocks to spare until an answer ends, which may take long."""
    limits = view.rules.saturation
    if limits is None:
        return False
    if c.holder in reserved:
        return True
    if not c.requests:  # a prefill worker has none
        return False
    card = view.fleet.slots[c.holder].card
    if c.requests >= limits.requests_share * card.max_num_seqs:
        return True
    return c.held_blocks + c.new_blocks > limits.blocks_share * card.total_blocks


def _may_shorten(pool: Pool, rules: RouterRules, request: RouteRequest) -> bool:
    """Return whether workers that cannot be the cheapest may be left out: any worker may take the request."""
    is_for_all = not (request.lora or request.exclude or request.pin or request.pin_prefill)
    is_for_all = is_for_all and request.among is None and not request.content
    return is_for_all and len(pool.decoders) + len(pool.prefillers) > FEW and rules.may_shortlist


def _eligible(
    fleet: WorkerFleet,
    slots: Sequence[Slot],
    request: RouteRequest,
    now: float,
    pin: WorkerId | None,
    pin_rank: int | None = None,
) -> Sequence[Slot]:
    """Return the slots that this request may use. An avoided worker is used only if there is no other."""
    if request.lora is not None:
        slots = [slot for slot in slots if request.lora in slot.card.loras]
    if request.content:
        slots = [slot for slot in slots if may_continue(slot.card, request)]
    if request.exclude or pin is not None:
        slots = [
            slot
            for slot in slots
            if slot.card.worker_id not in request.exclude
            and (pin is None or pin in (slot.card.worker_id, slot.card.name))
            and (pin is None or pin_rank is None or slot.holder.dp_rank == pin_rank)
        ]
    if not fleet.avoided_until:
        return slots
    return [slot for slot in slots if _is_trusted(fleet, slot, now)] or slots


def _is_trusted(fleet: WorkerFleet, slot: Slot, now: float) -> bool:
    """Return whether a worker has not failed a request lately."""
    return fleet.avoided_until.get(slot.card.worker_id, 0.0) <= now


# --- one worker or two ---------------------------------------------------------------------------------------------


def _wish(request: RouteRequest) -> bool | None:
    """Return what the caller asked for; None: nothing."""
    return True if request.pin_prefill is not None else request.disaggregate


def _backlog(prefill: LegChoice, whole: LegChoice, view: RequestView) -> Backlog:
    def until_done(c: Candidate) -> float:
        missing = max(0, view.request.isl_tokens - saved_tokens(c, view))
        return (c.queued_tokens + missing) / c.capacity

    spare_share = _spare_share(whole.chosen, view) if prefill.is_full else 1.0
    return Backlog(until_done(prefill.chosen), until_done(whole.chosen), prefill.is_full, spare_share)


def _spare_share(c: Candidate, view: RequestView) -> float:
    """Return which share of its time a decode worker may give to more prompts than it has had."""
    slo_itl_s, times = view.rules.slo_itl_s, view.times
    if not slo_itl_s or not c.requests or times is None:
        return 1.0
    had = view.fleet.slots[c.holder].load.with_prompts.of(1, view.now)
    return times.spare_share(c.requests + 1, slo_itl_s) - had


def _paired(prefill: LegChoice, whole: LegChoice, reason: str, view: RequestView) -> PlacementPlan:
    """Return the plan for two workers whose KV is equal; for one, and why, where there are none.

    If no decode worker may take KV of the chosen prefill worker, another prefill worker is chosen.
    """
    lora, apart = view.request.lora, None
    card = _card(prefill, view)
    compatible = partners(card, view.decoders, lora)
    if len(compatible) < len(view.decoders):
        apart = Apart(card, view.decoders, lora)
        if not compatible and (others := _with_partners(view)):
            prefill = _choose_leg("prefill", others, view)
            card = _card(prefill, view)
            compatible = partners(card, view.decoders, lora)
    if not compatible and apart is not None:
        problem, pinned = apart.problem, view.request.pin_prefill
        if pinned is not None:
            raise NoWorkerError(
                f"{problem} from {pinned!r}", hint="start both with one --kv-transfer and equal weights"
            )
        return PlacementPlan(whole, whole, problem, view, apart)
    decode = _choose_leg("decode", compatible, view)
    if decode.is_full and not whole.is_full and not _wish(view.request):
        return PlacementPlan(whole, whole, "no decode worker that could pull KV has room", view, apart)
    return PlacementPlan(prefill, decode, reason, view, apart, is_unknown(card, _card(decode, view)))


def _with_partners(view: RequestView) -> Sequence[Slot]:
    """Return the prefill workers whose KV a decode worker may take: few requests ask this, while weights change."""
    kinds = {(slot.card.transfer, slot.card.content_of(view.request.lora)): slot for slot in view.decoders}
    return [
        slot
        for slot in view.prefillers
        if any(not why_apart(slot.card, other.card, view.request.lora) for other in kinds.values())
    ]


def _card(leg: LegChoice, view: RequestView) -> WorkerCard:
    return view.fleet.slots[leg.chosen.holder].card


# --- one leg -------------------------------------------------------------------------------------------------------


def _choose_leg(kind: LegKind, slots: Sequence[Slot], view: RequestView) -> LegChoice:
    """Choose the worker of a leg. If that worker is full, the request waits for it.

    A worker that holds more of the prompt than the others is worth waiting for until it has computed what is queued
    there, if the others cost more. Otherwise no request waits while a worker has room.
    """
    rules, request, reserved = view.rules, view.request, view.ahead.reserved
    cost = PlacementCost(request.isl_tokens, view.block_size, kind, rules.weights, view.price)
    candidates = _candidates(slots, view, {} if kind == "decode" else view.sources)
    passed_over = _held_back(candidates, view) if view.held_back else {}
    if view.bound_to is not None:
        bound = next((c for c in candidates if c.holder == view.bound_to), None)
        if bound is not None and not _is_full(bound, kind, view, reserved):
            return LegChoice(kind, bound, False, "its session runs there", cost, candidates, passed_over)
    allowed = [c for c in candidates if c.holder not in passed_over] if passed_over else candidates
    chosen = choose(allowed, cost, rules.policy, rules.temperature, view.rng)
    is_full = rules.waits_for_room and _is_full(chosen, kind, view, reserved)
    if is_full and (others := [c for c in allowed if not _is_full(c, kind, view, reserved)]):
        other = choose(others, cost, rules.policy, rules.temperature, view.rng)
        if not (POLICIES[rules.policy].by_cost and _is_worth_waiting_for(chosen, other, view)):
            open_now = {c.holder for c in others}
            passed_over |= {c.holder: "full" for c in allowed if c.holder not in open_now}
            chosen, is_full = other, False
    return LegChoice(kind, chosen, is_full, "", cost, candidates, passed_over)


def _is_worth_waiting_for(full: Candidate, other: Candidate, view: RequestView) -> bool:
    """Return whether a full worker will soon have room and holds more of the prompt than the best of the others.

    If the other one can pull what it lacks, no request waits.
    """
    if other.pull is not None:
        return False
    return saved_tokens(full, view) > saved_tokens(other, view) and not is_packed(full, view, view.ahead.reserved)


def _held_back(candidates: Sequence[Candidate], view: RequestView) -> dict[Holder, str]:
    """Return the candidates that are held back and why; never all of them."""
    passed_over = {c.holder: "new: held back" for c in candidates if c.holder in view.held_back}
    return passed_over if len(passed_over) < len(candidates) else {}


def _sources(
    fleet: WorkerFleet,
    pool: Pool,
    rules: RouterRules,
    request: RouteRequest,
    overlaps: Mapping[Holder, Depths],
    now: float,
) -> Mapping[PeerKind, PeerSource]:
    """Return for each kind of workers the one that has most of the prompt, by the index alone: what is still being
    computed cannot be pulled."""
    if not overlaps:
        return {}
    kinds: dict[Holder, PeerKind] = {}
    for holder in overlaps:
        slot = fleet.slots.get(holder)
        if slot is None or (kind := kind_of(slot.card)) is None or slot.card.worker_id in request.exclude:
            continue
        if slot.card.model == request.model and _is_trusted(fleet, slot, now):
            kinds[holder] = kind
    if not kinds:
        return {}
    found = pool.index.match(request.sequence_hashes)
    best = deepest(found, {holder: kind for holder, kind in kinds.items() if holder in found})
    return {
        kind: pool.peers.source(kind, holder, depth, rules.weights.transfer) for kind, (depth, holder) in best.items()
    }


def _pull_of(slot: Slot, overlap: Depths, sources: Mapping[PeerKind, PeerSource], view: RequestView) -> PeerPull | None:
    kind = kind_of(slot.card)
    source = None if kind is None else sources.get(kind)
    if source is None or source.holder == slot.holder:
        return None
    return pull_of(source, overlap, slot.savings, view.rules.weights, view.request.isl_tokens / view.block_size)


def _candidates(slots: Sequence[Slot], view: RequestView, sources: Mapping[PeerKind, PeerSource]) -> list[Candidate]:
    overlaps, active, ahead, now = view.overlaps, view.active, view.ahead.tokens, view.now
    num_blocks = len(view.request.sequence_hashes) // _HASH_BYTES
    found: list[Candidate] = []
    for slot in slots:
        holder, load = slot.holder, slot.load
        queued, held, requests = load.total
        if load.prefilling:
            queued -= load.done_tokens(now)
        if ahead:
            queued += ahead.get(holder, 0)
        overlap = overlaps.get(holder, NOWHERE)
        found.append(
            Candidate(
                holder,
                overlap,
                queued,
                held,
                num_blocks - active.get(holder, 0),
                requests,
                slot.card.capacity,
                slot.last_chosen,
                slot.savings,
                _pull_of(slot, overlap, sources, view) if sources else None,
            )
        )
    return found


def _is_full(c: Candidate, kind: LegKind, view: RequestView, reserved: Collection[Holder]) -> bool:
    limits = view.rules.saturation
    if limits is None:
        return False
    if kind != "decode" and c.queued_tokens >= limits.queued_tokens * c.capacity:
        return True
    return is_packed(c, view, reserved)
