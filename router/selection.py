"""Work out what a placement costs on each worker. Pure: facts come in, costs go out. router/policies.py chooses."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

from kvmesh.protocol.messages import WorkerCard
from kvmesh.protocol.tiers import Tier
from kvmesh.router.index import Depths, Holder

LegKind = Literal["whole", "prefill", "decode"]
NOWHERE: Depths = (0, 0, 0, 0)


class TierSaving(NamedTuple):
    """Savings of one tier of a worker, in blocks to compute."""

    share: float  # of each block that is loaded instead
    latency: float = 0.0  # to be paid once


TierSavings: TypeAlias = tuple[TierSaving | None, TierSaving | None, TierSaving | None]
"""Says what a block saves in host memory, on disk and in object storage, as the worker measured. None: not measured."""


class PeerPull(NamedTuple):
    """A pull of a prompt's beginning from a peer, which a worker would make instead of computing it."""

    source: Holder
    blocks: int  # leading blocks of the prompt that need not be computed then
    work: float  # the time that it takes, in blocks to compute


class Candidate(Struct):
    """A (worker, dp rank) that may take the request, as the router sees it now."""

    holder: Holder
    overlap: Depths = NOWHERE  # leading blocks of the prompt: on its device, there or in host memory, ... anywhere
    queued_tokens: float = 0.0  # placed there and not computed yet
    held_blocks: float = 0.0  # by the prompts and answers of running requests
    new_blocks: int = 0  # of this prompt, held by no running request there
    requests: int = 0
    capacity: float = 1.0  # > 0; its speed relative to the other workers
    last_chosen: int = 0  # number of the choice that chose it last: equal costs go to the smallest
    savings: TierSavings | None = None  # of its lower tiers; None: it reports none
    pull: PeerPull | None = None  # from a peer, if that saves time


class Weights(Struct, frozen=True):
    """The weights of a placement's cost, in KV blocks. Source: docs/routing.md, "Cost of a placement"."""

    prefill: float = 1.0  # per block to compute or queued: favours TTFT
    decode: float = 0.2  # per block held by running requests: evens load and so ITL
    request: float = 0.0  # per running request
    transfer: float = 0.1  # per block that must be pulled from a prefill worker
    # Share of a block's work that is saved where it lies in host memory, of a worker that does not report it.
    host: float = 0.75
    disk: float = 0.25
    object: float = 0.1

    @property
    def prefers_less(self) -> bool:
        """True if, of two workers, the one with fewer blocks in use and no more of anything else costs less."""
        return self.decode > 0 and min(self.prefill, self.request) >= 0


def savings_of(card: WorkerCard) -> TierSavings | None:
    """Return what the tiers of a worker save of a block: 1 - load / compute; None if its card reports none."""
    compute_s = card.prefill_token_s * card.block_size
    if not card.tiers or not compute_s:
        return None
    measured = {tier.tier: tier for tier in card.tiers if tier.block_s}
    host, disk, far = [
        TierSaving(max(0.0, 1.0 - one.block_s / compute_s), one.latency_s / compute_s)
        if (one := measured.get(tier)) is not None
        else None
        for tier in (Tier.HOST, Tier.DISK, Tier.SHARED)
    ]
    return host, disk, far


def saved_blocks(overlap: Depths, savings: TierSavings | None, weights: Weights) -> float:
    """Return how many blocks of work are saved where these leading blocks of a prompt lie, <= overlap[-1]."""
    device, host, disk, anywhere = overlap
    saved = float(device)
    if anywhere == device:
        return saved
    shares = (weights.host, weights.disk, weights.object)
    for number, blocks in enumerate((host - device, disk - host, anywhere - disk)):
        saving = None if savings is None else savings[number]
        if saving is None:
            saved += shares[number] * blocks
        elif blocks:
            saved += max(0.0, saving.share * blocks - saving.latency)
    return saved


class Terms(NamedTuple):
    """The parts of a cost, in blocks, before it is divided by the worker's capacity."""

    compute: float
    queue: float
    held: float
    requests: float
    transfer: float


class PlacementCost:
    """The cost of placing one leg of one prompt, for any candidate."""

    __slots__ = ("_isl_blocks", "_pull", "_rates", "_weights")

    def __init__(
        self, isl_tokens: int, block_size: int, leg: LegKind, weights: Weights, recompute_price: float = 1.0
    ) -> None:
        computes, decodes = leg != "decode", leg != "prefill"
        self._isl_blocks = isl_tokens / block_size
        self._weights = weights
        self._pull = weights.prefill * computes  # per block's time to pull: nobody else waits for it
        self._rates = (
            weights.prefill * recompute_price * computes,  # per block to compute
            weights.prefill / block_size * computes,  # per queued token
            weights.decode * decodes,  # per block held
            weights.request * decodes,  # per request
            weights.transfer * (not computes),  # per block to pull
        )

    def terms(self, c: Candidate) -> tuple[float, float, float, float, float]:
        """Return the fields of `Terms`."""
        compute, queue, held, request, transfer = self._rates
        saved = saved_blocks(c.overlap, c.savings, self._weights) if c.pull is None else c.pull.blocks
        missing = max(0.0, self._isl_blocks - saved)
        return (
            compute * missing,
            queue * c.queued_tokens,
            held * (c.held_blocks + c.new_blocks),
            request * c.requests,
            transfer * missing + (0.0 if c.pull is None else self._pull * c.pull.work),
        )

    def cost(self, c: Candidate) -> float:
        return self.costs((c,))[0]

    def costs(self, candidates: Sequence[Candidate]) -> list[float]:
        """Return for each candidate the sum of its terms divided by its capacity.

        It repeats the arithmetic of `terms` because every placement asks for the costs of all candidates.
        """
        compute, queue, held, request, transfer = self._rates
        isl_blocks = self._isl_blocks
        costs: list[float] = []
        for c in candidates:
            overlap = c.overlap
            missing = isl_blocks - overlap[0]
            if c.pull is not None:
                missing = isl_blocks - c.pull.blocks
            elif overlap[-1] != overlap[0]:  # a block in a slower tier saves a share of its work
                missing = isl_blocks - saved_blocks(overlap, c.savings, self._weights)
            if missing < 0.0:
                missing = 0.0
            cost = compute * missing + queue * c.queued_tokens + held * (c.held_blocks + c.new_blocks)
            if c.pull is not None:
                cost += self._pull * c.pull.work
            costs.append((cost + request * c.requests + transfer * missing) / c.capacity)
        return costs

    def load(self, c: Candidate) -> float:
        """Return how loaded a worker is, divided by its capacity. Policies that ignore caches choose by it."""
        _, queue, held, request, _ = self._rates
        return (queue * c.queued_tokens + held * c.held_blocks + (request + 1) * c.requests) / c.capacity
