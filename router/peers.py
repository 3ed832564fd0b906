"""Decide whether a worker would pull the beginning of a prompt from a peer, and from which. Pure.

Workers whose cards have one print and one transfer hold KV of equal bytes for equal prompts. What a pull costs is
compared with what computing costs, in blocks to compute; both are measured by the workers themselves.
"""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import WorkerCard
from kvmesh.router.index import Depths, Holder
from kvmesh.router.selection import PeerPull, TierSavings, Weights, saved_blocks

UNMEASURED_LATENCY_S = 0.02  # of pulls: to ask, and to get the offer

PeerKind = tuple[str, str]  # print and transfer


def kind_of(card: WorkerCard) -> PeerKind | None:
    """Return what must be equal for two workers to pull from each other; None: this one does not."""
    return (card.kv_print, card.transfer) if card.kv_print and card.transfer else None


class _Mean(Struct):
    """The mean of what workers report; 0 while none does."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float, sign: int) -> None:
        self.count += sign
        self.total = self.total + sign * value if self.count else 0.0

    @property
    def value(self) -> float:
        return max(0.0, self.total / self.count) if self.count else 0.0


class PeerRates(Struct):
    """Track how fast the workers of one kind compute and pull a block, on average over their cards."""

    compute_s: _Mean
    pull_s: _Mean
    latency_s: _Mean
    workers: int = 0

    def add(self, card: WorkerCard, sign: int) -> None:
        self.workers += sign
        if card.prefill_token_s:
            self.compute_s.add(card.prefill_token_s * card.block_size, sign)
        if card.pull_block_s or card.pull_latency_s:
            self.pull_s.add(card.pull_block_s, sign)
            self.latency_s.add(card.pull_latency_s, sign)


class PeerSource(NamedTuple):
    """The worker that holds most of a prompt on its device, and what a pull costs, in blocks to compute."""

    holder: Holder
    depth: int  # leading blocks of the prompt
    block: float  # for each block
    latency: float  # once


class PeerFigures:
    """Track how fast the workers of one model compute and pull, by their kind."""

    def __init__(self) -> None:
        self._cards: dict[WorkerId, WorkerCard] = {}
        self._rates: dict[PeerKind, PeerRates] = {}

    def note(self, card: WorkerCard) -> None:
        """Take what a card says, in place of the one before."""
        self.forget(card.worker_id)
        if (kind := kind_of(card)) is not None:
            self._cards[card.worker_id] = card
            self._rates.setdefault(kind, PeerRates(_Mean(), _Mean(), _Mean())).add(card, 1)

    def forget(self, worker_id: WorkerId) -> None:
        card = self._cards.pop(worker_id, None)
        if card is not None and (kind := kind_of(card)) is not None:
            self._rates[kind].add(card, -1)
            if not self._rates[kind].workers:
                del self._rates[kind]

    def source(self, kind: PeerKind, holder: Holder, depth: int, transfer_weight: float) -> PeerSource:
        """Return a source with what pulling from it costs; a latency without end where computing was not measured.

        Pulls that no worker has measured cost `transfer_weight` for each block, as those from prefill workers do.
        """
        rates = self._rates.get(kind)
        if rates is None or not (compute_s := rates.compute_s.value):
            return PeerSource(holder, depth, 0.0, float("inf"))
        if not rates.pull_s.count:
            return PeerSource(holder, depth, transfer_weight, UNMEASURED_LATENCY_S / compute_s)
        return PeerSource(holder, depth, rates.pull_s.value / compute_s, rates.latency_s.value / compute_s)


def pull_of(
    source: PeerSource, overlap: Depths, savings: TierSavings | None, weights: Weights, prompt_blocks: float
) -> PeerPull | None:
    """Return the pull by which a worker with this overlap would save time; None: it would not.

    What a pull saves beyond its cost has to be more than its latency.
    """
    depth = min(source.depth, int(prompt_blocks))
    missing = depth - overlap[0]
    if missing <= 0:
        return None
    work = source.latency + source.block * missing
    if depth - saved_blocks(overlap, savings, weights) - work <= max(1.0, source.latency):
        return None
    return PeerPull(source.holder, depth, work)


def deepest(found: Mapping[Holder, Depths], kinds: Mapping[Holder, PeerKind]) -> dict[PeerKind, tuple[int, Holder]]:
    """Return for each kind the holder with most leading blocks on its device; of equal ones the last by name."""
    best: dict[PeerKind, tuple[int, Holder]] = {}
    for holder, kind in kinds.items():
        if depth := found[holder][0]:
            best[kind] = max(best.get(kind, (0, holder)), (depth, holder))
    return best
