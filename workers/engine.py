"""The engine seam: what the worker host needs from an engine. One module per backend implements it.

Every backend passes tests/contracts/test_engine.py.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvmesh.protocol.events import Digest, KvEvent
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import (
    CardTier,
    Control,
    ControlReply,
    Delta,
    Embedding,
    EmbedRequest,
    Feature,
    GenerateRequest,
    KvLayout,
    OfferedPrefix,
    OfferPrefix,
    PrefixSource,
    Role,
    WorkerTimes,
)
from kvmesh.protocol.tiers import Tier


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about an engine that are known once it has started."""

    model: str
    model_path: str
    block_size: int  # tokens per KV block
    total_blocks: int
    context_tokens: int  # prompt and answer together
    max_num_seqs: int
    layout: KvLayout
    transfer: str  # name of the KV transfer backend, "" if it has none
    features: tuple[Feature, ...] = ()
    loras: tuple[str, ...] = ()
    dp_size: int = 1  # total_blocks, max_num_seqs: of each rank
    roles: tuple[Role, ...] = ()  # between which it can change while it runs, if it is Turnable
    serves: bool = True  # else it computes for another node's worker, and the mesh does not hear of it
    tells_events: bool = True  # of its KV cache; if not, routers guess which blocks it holds
    retokenizes: bool = False  # its token ids are made of texts, and it counts `max_tokens` otherwise
    capacity: float = 1.0  # by its profile: speed against the other workers of its role
    tiers: tuple[CardTier, ...] = ()  # below the device, of each rank
    prefill_token_s: float = 0.0  # time to compute one token of a prompt; 0: not measured
    kv_print: str = ""  # workers with equal prints pull prefixes from each other; "": it does not
    content_fingerprint: str = ""  # as on the card, and so are those of adapters
    adapter_fingerprints: tuple[tuple[str, str], ...] = ()
    pull_block_s: float = 0.0  # time to pull one block from a peer; 0: not measured
    pull_latency_s: float = 0.0  # before the first one


@dataclass(frozen=True, slots=True)
class TierUse:
    """Report how one tier below the device is used."""

    tier: str
    blocks: int  # that can be read
    used_bytes: int
    limit_bytes: int
    block_bytes: int
    counts: Mapping[str, int]  # what has happened since the start, by kvmesh.kvcache.tiers.stack's words
    hit_shares: tuple[float, float]  # of the latest prompts' blocks: found on the device, and below it
    ios: Mapping[str, int] = field(default_factory=dict)  # reads and writes, by the path that they took
    is_readable: bool = True  # else it was switched off
    is_writable: bool = True


@dataclass(frozen=True, slots=True)
class EngineLoad:
    running: int
    waiting: int
    used_blocks: int  # held by running sequences and standing offers
    cached_blocks: int  # hold a prefix, evictable
    total_blocks: int
    offers: int  # standing KV offers
    queued_tokens: int | None = None  # of prompts, still to compute; None: the engine does not say
    stalled_s: float = 0.0  # how long the running step lasts already, of an engine whose steps are watched
    tiers: tuple[TierUse, ...] = ()  # below the device; of each rank


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Load of an engine, or of one rank of it, that routers cannot know from their bookings."""

    outside_requests: int = 0  # of callers that use the engine without the mesh
    outside_blocks: int = 0  # KV blocks that these requests hold
    queued_tokens: int = 0  # prompt tokens that are certainly still to compute, whoever sent them


class Caching(Protocol):
    """An engine, or one data-parallel rank of it, as the source of its KV events."""

    def on_kv_events(self, listener: Callable[[Sequence[KvEvent]], object]) -> None:
        """Call `listener` on the event loop, once a step, with what the cache stored and removed.

        What is there already comes first.
        """

    def kv_snapshot(self) -> list[KvEvent]:
        """Events that rebuild the pool's present content, parents before children."""

    def kv_digest(self) -> Digest:
        """Return the digest of the pool's present content. The listeners have been told of every change in it."""


class Engine(Caching, Protocol):
    async def start(self, worker_id: WorkerId, address: str) -> EngineInfo:
        """Load the model and get ready. `address`: the worker's request plane, where KV offers are released.

        Raises MeshError with what to do about it.
        """

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Compute one answer; the last delta has a finish reason or a ticket.

        Closing the iterator aborts the request and frees all it holds. A consumer that is slow gets the
        tokens of several steps in one delta. Raises InvalidRequestError, also for what is not among the features,
        and EngineError.
        """

    async def embed(self, request: EmbedRequest) -> Embedding:
        """Compute one vector. Cancelling it aborts the request. Raises as `generate` does."""

    def release(self, offer_id: int, nonce: int) -> None:
        """Unpin the blocks of an offer. Unknown offers are no error."""

    def load(self) -> EngineLoad: ...

    def check_health(self) -> None:
        """Raises EngineError if the engine can serve no more."""

    async def stop(self) -> None:
        """Abort what runs and free everything. A second call does nothing."""


@runtime_checkable
class KeepsTimes(Protocol):
    """An engine that knows when it began with a request."""

    # Returns the times of a request that has a trace and is still being answered; None if it is not known.
    times: Callable[[RequestId], WorkerTimes | None]


@runtime_checkable
class Ranked(Protocol):
    """An engine of data-parallel ranks, each with KV events of its own."""

    @property
    def ranks(self) -> Sequence[Caching]: ...


@runtime_checkable
class Pushing(Protocol):
    """An engine that can hand tokens on in the step that made them, without waking a task for each."""

    def push(self, request: GenerateRequest, take: Callable[[Delta], bool]) -> AsyncGenerator[Delta, None]:
        """Compute one answer as `generate` does, but offer its deltas to `take` first.

        A delta is offered if the iterator is being waited for and the delta does not end the answer. If `take` returns
        False, the iterator yields the delta. `take` must not raise.
        """


PeerAnswers = Callable[[str, float], Awaitable[bool]]  # an address and a time: does a worker answer there?
# Asks a worker for a prefix; the offer stands while the context is open.
AskPrefix = Callable[[PrefixSource, OfferPrefix], AbstractAsyncContextManager[OfferedPrefix]]


@runtime_checkable
class PullsKv(Protocol):
    """An engine that pulls KV itself. It asks peers on the request plane whether they live, when a pull is late."""

    peer_answers: PeerAnswers | None


@runtime_checkable
class SharesPrefixes(Protocol):
    """An engine of ours, which pulls prefixes from other workers and offers them its own."""

    ask_prefix: AskPrefix | None

    def offer_prefix(self, asked: OfferPrefix) -> OfferedPrefix:
        """Pin the blocks that are wanted and are here, until `release`. Raises MeshError if too many are pinned."""


@runtime_checkable
class Turnable(Protocol):
    """An engine whose worker can go from one role to another, of those in its EngineInfo, and keep its cache."""

    def rename(self, worker_id: WorkerId) -> None:
        """Take another worker id. Standing offers, and later ones, keep the id that the engine started with."""


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine, or one rank of it, that reports load to routers."""

    def on_load_change(self, listener: Callable[[], object]) -> None:
        """Call `listener` on the event loop whenever `report` may have changed, and never while nothing changes."""

    def report(self) -> EngineReport: ...


@runtime_checkable
class ResetsCache(Protocol):
    """An engine of ours, which can forget its prefix cache. It has no other controls of its own."""

    async def reset_cache(self, tiers: Collection[Tier] | None = None) -> None:
        """Forget the cached blocks of some tiers, or of all, also those that would outlive the worker.

        Shared storage forgets them for all workers of the model.

        Raise InvalidRequestError while blocks are in use or for a tier that is not there, and EngineError if a tier
        cannot keep the reset.
        """


@runtime_checkable
class Sleeps(Protocol):
    """An engine of ours that can give its memory back, and get it again."""

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache; tiers that outlive the worker stay. It has no requests any more."""

    async def wake(self) -> None:
        """Be as after the start again. Raise ConfigError or EngineError: then the engine sleeps on."""


@runtime_checkable
class Controllable(Protocol):
    """An engine that carries out calls of operators."""

    async def control(self, request: Control) -> ControlReply:
        """Carry out the call. Raises InvalidRequestError if this engine cannot do it, and EngineError."""
