"""The router itself, as a pure state machine: cards, KV events and requests in, placements out.

The live service, a replayed trace and the tests drive this same object; time is a parameter.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.errors import NoWorkerError
from protocol.events import KvEvent
from protocol.ids import RequestId, WorkerId
from protocol.messages import Placed, Role, RouteRequest, Target, WorkerCard
from router.disaggregation import LocalPrefill, decide
from router.index import Holder, PrefixIndex
from router.load import ActiveLoad
from router.selection import Candidate, Cost, Policy, Weights, decode_cost, place, prefill_cost, whole_cost


@dataclass(frozen=True, slots=True)
class RouterRules:
    policy: Policy = "kv"
    weights: Weights = field(default_factory=Weights)
    temperature: float = 0.0
    local_prefill: LocalPrefill = field(default_factory=LocalPrefill)
    suspect_s: float = 2.0  # a worker that failed a request is avoided for so long


class RouterState:
    def __init__(self, rules: RouterRules, seed: int = 0) -> None:
        self._rules = rules
        self._rng = random.Random(seed)
        self._cards: dict[WorkerId, WorkerCard] = {}
        self._suspect_until: dict[WorkerId, float] = {}
        self._last_chosen: dict[Holder, int] = {}
        self._choices = 0
        self.index = PrefixIndex()
        self.load = ActiveLoad()

    @property
    def cards(self) -> Sequence[WorkerCard]:
        return list(self._cards.values())

    def add_worker(self, card: WorkerCard) -> None:
        """Take a worker in. Those of one model have one block size: router/members.py sees to it."""
        self._cards[card.worker_id] = card

    def remove_worker(self, worker_id: WorkerId) -> None:
        card = self._cards.pop(worker_id, None)
        self._suspect_until.pop(worker_id, None)
        self.index.drop_worker(worker_id)
        for dp_rank in range(card.dp_size if card else 0):
            self._last_chosen.pop(Holder(worker_id, dp_rank), None)

    def on_kv_events(self, worker_id: WorkerId, dp_rank: int, events: Sequence[KvEvent]) -> None:
        if worker_id in self._cards:  # what arrives after a worker has left must not bring it back
            self.index.apply(Holder(worker_id, dp_rank), events)

    def place(self, request: RouteRequest, now: float) -> Placed:
        """Choose and book. The booking stands until `free`. Raises NoWorkerError."""
        self._suspect(request.exclude, now)
        decoders = self._eligible(request, now, {Role.DECODE, Role.AGGREGATED}, pin=request.pin)
        if not decoders:
            raise NoWorkerError(self._why_none(request), hint="start one: `kvmesh up`, or `python -m workers`")
        overlaps = self.index.match(request.sequence_hashes)
        block_size = decoders[0].block_size
        whole = whole_cost(request.isl_tokens, block_size, self._rules.weights)
        local = self._choose(decoders, request, overlaps, whole)
        prefillers = self._eligible(request, now, {Role.PREFILL})
        decision = decide(
            request.isl_tokens,
            local.overlap_blocks * block_size,
            bool(prefillers),
            request.disaggregate,
            self._rules.local_prefill,
        )
        if not decision.disaggregate:
            return self._book(request, local, None, block_size, decision.reason)
        first = self._choose(
            prefillers, request, overlaps, prefill_cost(request.isl_tokens, block_size, self._rules.weights)
        )
        transfer = self._cards[first.holder.worker_id].transfer
        compatible = [card for card in decoders if card.transfer == transfer]
        if not compatible:
            return self._book(request, local, None, block_size, f"no decode worker can pull KV over {transfer!r}")
        second = self._choose(
            compatible, request, overlaps, decode_cost(len(request.sequence_hashes), self._rules.weights)
        )
        return self._book(request, second, first, block_size, decision.reason)

    def prefill_done(self, request_id: RequestId) -> None:
        self.load.prefill_done(request_id)

    def free(self, request_id: RequestId) -> None:
        self.load.free(request_id)

    def _suspect(self, workers: Sequence[WorkerId], now: float) -> None:
        for worker_id in workers:
            if worker_id in self._cards:
                self._suspect_until[worker_id] = now + self._rules.suspect_s

    def _eligible(
        self, request: RouteRequest, now: float, roles: set[Role], pin: str | None = None
    ) -> list[WorkerCard]:
        """Workers of the model that may take this request. Suspects only if there is nobody else."""
        cards = [
            card
            for card in self._cards.values()
            if card.model == request.model
            and card.role in roles
            and card.worker_id not in request.exclude
            and (pin is None or pin in (card.worker_id, card.name))
        ]
        trusted = [card for card in cards if self._suspect_until.get(card.worker_id, 0.0) <= now]
        return trusted or cards

    def _choose(
        self, cards: Sequence[WorkerCard], request: RouteRequest, overlaps: dict[Holder, int], cost: Cost
    ) -> Candidate:
        candidates = [
            self._candidate(Holder(card.worker_id, dp_rank), request, overlaps)
            for card in cards
            for dp_rank in range(card.dp_size)
        ]
        return place(candidates, cost, self._rules.policy, self._rules.temperature, self._rng)

    def _candidate(self, holder: Holder, request: RouteRequest, overlaps: dict[Holder, int]) -> Candidate:
        load = self.load.of(holder)
        return Candidate(
            holder=holder,
            overlap_blocks=overlaps.get(holder, 0),
            active_prefill_tokens=load.prefill_tokens,
            active_decode_blocks=load.decode_blocks,
            new_blocks=load.new_blocks(request.sequence_hashes),
            active_requests=load.requests,
            last_chosen=self._last_chosen.get(holder, 0),
        )

    def _book(
        self, request: RouteRequest, decode: Candidate, prefill: Candidate | None, block_size: int, reason: str
    ) -> Placed:
        computes = prefill or decode
        self.load.book(
            request.request_id,
            decode=decode.holder,
            prefill=computes.holder,
            prefill_tokens=max(0, request.isl_tokens - computes.overlap_blocks * block_size),
            hashes=request.sequence_hashes,
        )
        for chosen in (decode, prefill):
            if chosen is not None:
                self._choices += 1
                self._last_chosen[chosen.holder] = self._choices
        return Placed(
            decode=self._target(decode), prefill=None if prefill is None else self._target(prefill), reason=reason
        )

    def _target(self, chosen: Candidate) -> Target:
        card = self._cards[chosen.holder.worker_id]
        return Target(
            worker_id=card.worker_id,
            name=card.name,
            address=card.address,
            dp_rank=chosen.holder.dp_rank,
            overlap_blocks=chosen.overlap_blocks,
        )

    def _why_none(self, request: RouteRequest) -> str:
        roles = sorted(card.role for card in self._cards.values() if card.model == request.model)
        if request.pin is not None:
            mine = [card for card in self._cards.values() if card.model == request.model]
            able = sorted(card.name for card in mine if card.role is not Role.PREFILL)
            return f"no decode worker {request.pin!r} serves {request.model!r}; there are: {', '.join(able) or 'none'}"
        if request.exclude and roles:
            return f"every worker of the model {request.model!r} that could decode has failed this request"
        return f"no worker that decodes the model {request.model!r} is ready; there are: {', '.join(roles) or 'none'}"
