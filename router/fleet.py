"""The fleet as the router knows it: the workers, the slots where requests can run, and what their caches hold.

Pure; the time is a parameter. The fleet changes with cards and KV events. Placements read it (router/placing.py).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from kvmesh.protocol.errors import WireError
from kvmesh.protocol.events import KvEvent
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Role, WorkerCard
from kvmesh.router.index import Depths, Digest, Holder, PrefixIndex, names_of
from kvmesh.router.load import ActiveLoad, HolderLoad
from kvmesh.router.peers import PeerFigures
from kvmesh.router.prediction import CachePredictions, deepen
from kvmesh.router.pressure import BusyShare, PrefixDemand, WorkSpread
from kvmesh.router.selection import TierSavings, savings_of
from kvmesh.router.shortlist import Shelves
from kvmesh.router.warmup import WarmUp

TIERS_SHARE = 16  # blocks that a rank may report for each block on its card: host memory and disks are larger
FEW_BLOCKS = 4096  # that every rank may report besides
NOBODY: frozenset[Holder] = frozenset()
LEG_ROLES = ((Role.DECODE, Role.AGGREGATED), (Role.PREFILL,))  # of the workers that one leg is chosen from


@dataclass(slots=True, eq=False)
class Slot:
    """A place where a request can run: one (worker, dp rank)."""

    holder: Holder
    card: WorkerCard
    load: HolderLoad
    last_chosen: int = 0  # the number of the choice; 0: never
    savings: TierSavings | None = None  # of its card's tiers

    @property
    def in_flight(self) -> int:
        """The requests that run here; a prefill worker has prompts to compute instead."""
        return self.load.total.requests or len(self.load.prefilling)


@dataclass(slots=True, eq=False)
class Pool:
    """All workers of one model, and statistics of the requests for it."""

    index: PrefixIndex = field(default_factory=PrefixIndex)
    prefillers: list[Slot] = field(default_factory=list)
    decoders: list[Slot] = field(default_factory=list)  # decode workers, then aggregated ones
    shelves: dict[Role, Shelves[Slot]] = field(default_factory=lambda: {role: Shelves() for role in Role})
    prefill_busy: BusyShare = field(default_factory=BusyShare)
    decode_busy: BusyShare = field(default_factory=BusyShare)
    spread: WorkSpread = field(default_factory=WorkSpread)
    demand: PrefixDemand = field(default_factory=PrefixDemand)
    peers: PeerFigures = field(default_factory=PeerFigures)

    def slots_of(self, role: Role) -> list[Slot]:
        return self.prefillers if role is Role.PREFILL else self.decoders

    def busy_of(self, role: Role) -> BusyShare:
        return self.prefill_busy if role is Role.PREFILL else self.decode_busy

    @property
    def slots(self) -> Iterator[Slot]:
        return chain(self.decoders, self.prefillers)


class Shortlists(NamedTuple):
    """The slots that a request has to be placed by, of all slots of its model."""

    decoders: Sequence[Slot]
    prefillers: Sequence[Slot]
    held_back: Collection[Holder]  # workers that have just joined, and may take no further request; not all are listed


def most_blocks(card: WorkerCard) -> int:
    """Return how many blocks a rank of a worker may report: tiers that its card does not list are allowed for."""
    return TIERS_SHARE * card.total_blocks + sum([tier.blocks for tier in card.tiers]) + FEW_BLOCKS


class OverfullError(WireError):
    """A worker reports far more KV blocks than its card has."""


class WorkerFleet:
    """All workers that a router knows, with one pool per model. `load` and `predictions` belong to its router."""

    def __init__(
        self, load: ActiveLoad, predictions: CachePredictions, *, ramp_s: float = 10.0, suspect_s: float = 2.0
    ) -> None:
        self.load = load
        self.predictions = predictions
        self.pools: dict[str, Pool] = {}  # by model
        self.slots: dict[Holder, Slot] = {}
        self.avoided_until: dict[WorkerId, float] = {}  # workers that failed a request lately
        self.warm_up = WarmUp(ramp_s=ramp_s)
        self._suspect_s = suspect_s
        self._cards: dict[WorkerId, WorkerCard] = {}
        self._names: dict[Holder, int] = {}  # names of blocks in the index, or a few more
        self._choices = 0
        self._avoided: frozenset[Holder] = NOBODY
        self._unsettled: frozenset[Holder] = NOBODY
        self._unsettled_of = 0  # the changes of the warm-up that it was made from

    # --- workers ---------------------------------------------------------------------------------------------------

    @property
    def cards(self) -> Sequence[WorkerCard]:
        return list(self._cards.values())

    def block_size_of(self, model: str) -> int:
        """Return the tokens per KV block of a model's workers; 1 for a model without workers."""
        pool = self.pools.get(model)
        return 1 if pool is None else next(pool.slots).card.block_size

    def add_worker(self, card: WorkerCard, now: float) -> None:
        """Add a worker, or replace its card. All workers of a model have one block size: router/members.py checks it.

        A card of another model, role or number of ranks is another worker: what is known of the old one is forgotten.
        """
        known = self._cards.get(card.worker_id)
        if known is not None and (known.model, known.role, known.dp_size) != (card.model, card.role, card.dp_size):
            self.remove_worker(card.worker_id, now)
            known = None
        self._cards[card.worker_id] = card
        if (pool := self.pools.get(card.model)) is None:
            pool = self.pools[card.model] = Pool()
        pool.peers.note(card)
        for dp_rank in range(card.dp_size):
            self._put_slot(pool, Holder(card.worker_id, dp_rank), card)
        if known is None:
            self.warm_up.joined(card.worker_id, now)

    def remove_worker(self, worker_id: WorkerId, now: float) -> None:
        """Forget a worker with its blocks and its bookings. An unknown worker is no error."""
        card = self._cards.pop(worker_id, None)
        if card is None:
            return
        pool = self.pools[card.model]
        for dp_rank in range(card.dp_size):
            holder = Holder(worker_id, dp_rank)
            self.load.leave(holder, now)
            self._names.pop(holder, None)
            pool.slots_of(card.role).remove(self.slots.pop(holder))
            pool.shelves[card.role].remove(holder)
        pool.index.drop_worker(worker_id)
        pool.peers.forget(worker_id)
        self._trust(worker_id)
        self.predictions.forget_worker(worker_id)
        self.warm_up.left(worker_id)
        if not (pool.decoders or pool.prefillers):
            del self.pools[card.model]

    def _put_slot(self, pool: Pool, holder: Holder, card: WorkerCard) -> None:
        slot = self.slots.get(holder)
        if slot is None:
            slot = self.slots[holder] = Slot(holder, card, self.load.join(holder, pool.busy_of(card.role)))
            slots = pool.slots_of(card.role)
            slots.append(slot)
            slots.sort(key=lambda s: (s.card.role is Role.AGGREGATED, s.holder))
        slot.card, slot.savings = card, savings_of(card)
        self._shelve(slot)

    def avoid(self, workers: Sequence[WorkerId], now: float) -> None:
        """Avoid workers that have failed a request for a while."""
        self.forgive(now)
        for worker_id in workers:
            if worker_id in self._cards:
                self.avoided_until[worker_id] = now + self._suspect_s
                self._avoided = self._holders_of(self.avoided_until)

    def forgive(self, now: float) -> None:
        """Trust the workers again that were avoided for long enough."""
        if self.avoided_until:
            for worker_id in [known for known, until in self.avoided_until.items() if until <= now]:
                self._trust(worker_id)

    def _trust(self, worker_id: WorkerId) -> None:
        if self.avoided_until.pop(worker_id, None) is not None:
            self._avoided = self._holders_of(self.avoided_until)

    def note_choice(self, holder: Holder) -> None:
        """Remember that this slot was chosen last: of equal costs, the slot chosen longest ago is taken."""
        self._choices += 1
        self.slots[holder].last_chosen = self._choices

    # --- what their caches hold ------------------------------------------------------------------------------------

    @property
    def indexes(self) -> Mapping[str, PrefixIndex]:
        """The prefix index of each model."""
        return {model: pool.index for model, pool in self.pools.items()}

    def on_kv_events(self, worker_id: WorkerId, dp_rank: int, events: Iterable[KvEvent]) -> None:
        """Apply KV events. Events of a worker that has left must not bring it back."""
        if (card := self._cards.get(worker_id)) is not None:
            self.pools[card.model].index.apply(Holder(worker_id, dp_rank), events)
            self.predictions.reported(Holder(worker_id, dp_rank))

    def on_kv_batch(self, worker_id: WorkerId, dp_rank: int, payload: bytes) -> int:
        """Apply a batch of KV events as it came from the wire. Return their number.

        Raises WireError if it cannot be read, OverfullError if the rank now reports far more blocks than its card has.
        """
        if (card := self._cards.get(worker_id)) is None:
            return 0
        holder = Holder(worker_id, dp_rank)
        index = self.pools[card.model].index
        before = index.num_entries
        num_events = index.apply_payload(holder, payload)
        self.predictions.reported(holder)  # the events of the prompts that it has computed are among them
        self._check_size(holder, card, index, index.num_entries - before)
        return num_events

    def _check_size(self, holder: Holder, card: WorkerCard, index: PrefixIndex, more: int) -> None:
        """Forget the blocks of a rank that reports far more than its card has. Raises OverfullError for such a rank.

        The names of a holder are counted by what each batch adds. Others may have lost some to make room for it, so a
        count that is too large is made exact before it is believed.
        """
        most = most_blocks(card)
        names = max(index.blocks_of(holder), self._names.get(holder, 0) + more)
        if names > most:
            names = names_of(index, holder)
        if names <= most:
            self._names[holder] = names
            return
        index.drop(holder)
        self._names.pop(holder, None)
        raise OverfullError(
            f"{names} blocks are reported where the card has {card.total_blocks}",
            hint=f"at most {most} are kept, so all of them are forgotten",
        )

    def forget_kv(self, worker_id: WorkerId, dp_rank: int) -> None:
        """Forget the blocks of one holder, which will be reported again."""
        if (card := self._cards.get(worker_id)) is not None:
            self.pools[card.model].index.drop(Holder(worker_id, dp_rank))
            self._names.pop(Holder(worker_id, dp_rank), None)

    def digest(self, worker_id: WorkerId, dp_rank: int) -> Digest | None:
        """Return the digest of one holder's blocks; None for an unknown worker."""
        card = self._cards.get(worker_id)
        return None if card is None else self.pools[card.model].index.digest(Holder(worker_id, dp_rank))

    def overlaps(self, model: str, hashes: bytes, now: float) -> Mapping[Holder, Depths]:
        """Return how much of a prompt each holder of the model has, or will soon have."""
        pool = self.pools.get(model)
        if pool is None:
            return {}
        found, _ = self.find(pool, hashes, now)
        return {slot.holder: found[slot.holder] for slot in pool.slots if slot.holder in found}

    def find(self, pool: Pool, hashes: bytes, now: float) -> tuple[Mapping[Holder, Depths], Mapping[Holder, int]]:
        """Return how much of a prompt each holder has or will soon have, and how much running requests hold there.

        The first includes the second. Holders of other models may be among them.
        """
        if not hashes:
            return {}, {}
        found, active = pool.index.match(hashes), self.load.chains.match(hashes)
        if self.predictions.follows_in_flight:
            deepen(found, active)
            if self.load.prefilling.num_blocks:
                deepen(found, self.load.prefilling.match(hashes))
        self.predictions.deepen(found, hashes, now)
        return found, active

    # --- the shelves -----------------------------------------------------------------------------------------------

    def shortlists(self, pool: Pool, apart: set[Holder], now: float) -> Shortlists | None:
        """Return the slots that have to be scored. None: all have to, as most are `apart` or all of a role are avoided.

        apart: holders that differ by more than their load. Avoided workers are left out, and so are newcomers that may
        take no further request.
        """
        self._refresh()
        if 2 * len(apart) >= len(pool.decoders) + len(pool.prefillers):
            return None
        avoided = self._avoided
        for slots in (pool.decoders, pool.prefillers) if avoided else ():
            if len(avoided) >= len(slots) > 0 and all(slot.holder in avoided for slot in slots):
                return None
        held_back = self._held_back_in(pool, now)
        decode, aggregated, prefill = [
            shelves.shortlist(apart, avoided, held_back) if (shelves := pool.shelves[role]) else []
            for role in (Role.DECODE, Role.AGGREGATED, Role.PREFILL)
        ]
        return Shortlists(decode + aggregated, prefill, held_back)

    def held_back(self, slots: Sequence[Slot], now: float) -> Collection[Holder]:
        """Return those of the slots that may take no further request now, because their workers have just joined."""
        unsettled = self._unsettled_holders(now)
        if not unsettled:
            return NOBODY
        new = [(slot.holder, slot.in_flight) for slot in slots if slot.holder in unsettled]
        busiest = max([slot.in_flight for slot in slots if slot.holder not in unsettled], default=-1)
        return self.warm_up.held_back(new, busiest, now)

    def _held_back_in(self, pool: Pool, now: float) -> Collection[Holder]:
        """Return what `held_back` does for the decoders and for the prefillers of a pool, without reading them all."""
        unsettled = self._unsettled_holders(now)
        if not unsettled:
            return NOBODY
        found: set[Holder] = set()
        without = unsettled | self._avoided if self._avoided else unsettled
        for roles in LEG_ROLES:
            busiest, new = -1, list[tuple[Holder, int]]()
            for role in roles:
                if shelves := pool.shelves[role]:
                    new += shelves.in_flight_of(unsettled)
                    busiest = max(busiest, shelves.most_in_flight(without))
            if new:
                found.update(self.warm_up.held_back(new, busiest, now))
        return found

    def _unsettled_holders(self, now: float) -> frozenset[Holder]:
        """Return the holders of all workers, of any model, that have just joined."""
        warm_up = self.warm_up
        if warm_up.is_over(now):
            return NOBODY
        if warm_up.changes != self._unsettled_of:
            self._unsettled, self._unsettled_of = self._holders_of(warm_up.unsettled(now)), warm_up.changes
        return self._unsettled

    def _holders_of(self, workers: Iterable[WorkerId]) -> frozenset[Holder]:
        known = [(worker_id, self._cards[worker_id]) for worker_id in workers if worker_id in self._cards]
        return frozenset(Holder(worker_id, rank) for worker_id, card in known for rank in range(card.dp_size))

    def _refresh(self) -> None:
        for holder in self.load.changes.take():
            self._shelve(self.slots[holder])

    def _shelve(self, slot: Slot) -> None:
        card, load = slot.card, slot.load.total
        # a prefill worker's blocks and requests cost nothing, so having more of them must not make it look worse
        uncosted = (load.held_blocks, load.requests) if card.role is Role.PREFILL else ()
        moves = (card.transfer, card.content_fingerprint, card.kv_print)
        kind = (card.capacity, card.max_num_seqs, card.total_blocks, moves, uncosted)
        shelves = self.pools[card.model].shelves[card.role]
        shelves.put(slot.holder, slot, kind, load, slot.last_chosen, slot.in_flight)
