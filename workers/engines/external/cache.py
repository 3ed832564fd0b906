"""Mirror the cache of an engine that tells only events: one mirror per data-parallel rank, told to the mesh as one.

Implements kvevents.subscriber.Sink, for engines that publish over ZMQ; for one that is polled, call `apply`. Belongs to
the event loop it was made on.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from kvmesh.kvcache.mirror import CacheMirror
from kvmesh.kvevents.formats import decode_payload
from kvmesh.protocol.errors import WireError
from kvmesh.protocol.events import Cleared, Digest, KvEvent, Removed, Stored
from kvmesh.protocol.hashing import digest_term, sequence_hashes
from kvmesh.protocol.ids import EngineHash, SequenceHash, WorkerId
from kvmesh.protocol.tiers import Tier, tier_of

Listener = Callable[[Sequence[KvEvent]], object]

_U64 = 0xFFFF_FFFF_FFFF_FFFF


class EngineCache:
    """The blocks that the ranks hold together.

    A block is in a tier while at least one rank has it there, and all blocks before it in some tier.
    """

    def __init__(self, block_size: int, num_ranks: int = 1) -> None:
        self.listeners: list[Listener] = []
        self._block_size = block_size
        self._mirrors = [CacheMirror(block_size) for _ in range(num_ranks)]
        self._served: dict[str, str] = {}  # the name of adapters for clients, by the engine's name
        self._copies: Counter[tuple[EngineHash, Tier]] = Counter()  # ranks that hold it
        self._on_device = 0  # of those in _copies
        self._digest = 0  # sum of the terms of all in _copies

    def apply(self, rank: int, events: Iterable[KvEvent]) -> None:
        """Apply the events of rank `rank`. Raises WireError for blocks of another size."""
        if not 0 <= rank < len(self._mirrors):
            raise WireError(f"events of rank {rank}, the engine has {len(self._mirrors)}", hint="check --dp-size")
        self._tell(self._merged(rank, self._mirrors[rank].apply(map(self._as_served, events))))

    def serve_adapter(self, name: str, engine_name: str) -> None:
        """Announce blocks of the engine's adapter `engine_name` under `name`, and no others under that name."""
        if self._served.get(engine_name) == name:
            return
        self._served = {engines: clients for engines, clients in self._served.items() if clients != name}
        self._served[engine_name] = name
        for rank, mirror in enumerate(self._mirrors):
            self._tell(self._merged(rank, mirror.forget_adapter(name)))

    def _as_served(self, event: KvEvent) -> KvEvent:
        """Return the event with the adapter's name for clients. Late news of an earlier adapter gets no such name."""
        if not isinstance(event, Stored) or event.lora is None or not self._served:
            return event
        name = self._served.get(event.lora, event.lora)
        return replace(event, lora=f"{name}@unloaded" if name == event.lora in self._served.values() else name)

    def clear(self, rank: int) -> None:
        """Forget what that rank holds: it is no longer known."""
        self._tell(self._merged(rank, self._mirrors[rank].clear()))

    def snapshot(self) -> list[KvEvent]:
        told: set[tuple[EngineHash, Tier]] = set()
        events: list[KvEvent] = []
        for event in chain.from_iterable(mirror.snapshot() for mirror in self._mirrors):
            assert isinstance(event, Stored), "a snapshot has nothing else"
            tier = tier_of(event.medium)
            events += _runs(event, lambda name, tier=tier: (name, tier) not in told)  # type: ignore[misc]
            told.update((name, tier) for name in event.hashes)
        return events

    def held_tokens(self, tokens: bytes, seed: int) -> int:
        """Return how many leading tokens are cached, in whole blocks. `tokens`: packed as by protocol.hashing."""
        held = 0
        for name in sequence_hashes(tokens, self._block_size, seed):
            if not any((EngineHash(name), tier) in self._copies for tier in Tier):
                break
            held += self._block_size
        return held

    @property
    def digest_now(self) -> Digest:
        return Digest(len(self._copies), self._digest & _U64)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks on the device."""
        return self._on_device

    # --- kvmesh.kvevents.subscriber.Sink ---------------------------------------------------------------------

    def on_batch(self, worker_id: WorkerId, dp_rank: int, payload: bytes) -> None:
        self.apply(dp_rank, decode_payload(payload).events)

    def on_reset(self, worker_id: WorkerId, dp_rank: int, payloads: Sequence[bytes]) -> None:
        self.clear(dp_rank)
        for payload in payloads:
            self.on_batch(worker_id, dp_rank, payload)

    def digest(self, worker_id: WorkerId, dp_rank: int) -> Digest | None:
        """Return None: an engine tells no digest to compare with."""
        return None

    # --- from a rank's news to the cache's ------------------------------------------------------------

    def _merged(self, rank: int, news: Iterable[KvEvent]) -> list[KvEvent]:
        events: list[KvEvent] = []
        for event in news:
            match event:
                case Stored():
                    events += self._added(event)
                case Removed():
                    events += self._dropped(event)
                case Cleared():  # the mirror has forgotten by now which they were
                    events += self._recounted(rank)
        return events

    def _added(self, event: Stored) -> list[Stored]:
        tier = tier_of(event.medium)
        runs = list(_runs(event, lambda name: (name, tier) not in self._copies))
        for name in event.hashes:
            self._copies[name, tier] += 1
        for run in runs:
            self._digest += sum(digest_term(SequenceHash(name), tier) for name in run.hashes)
            self._on_device += len(run.hashes) * (tier is Tier.DEVICE)
        return runs

    def _dropped(self, event: Removed) -> list[Removed]:
        tier = tier_of(event.medium)
        gone: list[EngineHash] = []
        for name in event.hashes:
            self._copies[name, tier] -= 1
            if not self._copies[name, tier]:
                del self._copies[name, tier]
                self._digest -= digest_term(SequenceHash(name), tier)
                gone.append(name)
        self._on_device -= len(gone) * (tier is Tier.DEVICE)
        return [Removed(tuple(gone), event.medium)] if gone else []

    def _recounted(self, rank: int) -> list[KvEvent]:
        """Tell again what the other ranks hold: rank `rank` holds nothing now. Rare, so it may take its time."""
        self._copies.clear()
        self._digest = self._on_device = 0
        events: list[KvEvent] = [Cleared()]
        for number, mirror in enumerate(self._mirrors):
            if number != rank:
                events += [
                    run for event in mirror.snapshot() if isinstance(event, Stored) for run in self._added(event)
                ]
        return events

    def _tell(self, events: Sequence[KvEvent]) -> None:
        if events:
            for listener in self.listeners:
                listener(events)


class RankCache:
    """The cache of one data-parallel rank: empty until the engine has said its block size.

    Implements kvmesh.workers.engine.Caching.
    """

    def __init__(self) -> None:
        self._cache: EngineCache | None = None
        self._listeners: list[Listener] = []

    def begin(self, block_size: int) -> EngineCache:
        """Return the cache for the engine's events to go to."""
        self._cache = EngineCache(block_size)
        self._cache.listeners = self._listeners
        return self._cache

    def serve_adapter(self, name: str, engine_name: str) -> None:
        """Announce blocks of the engine's adapter `engine_name` under `name`, and no others under that name."""
        if self._cache is not None:
            self._cache.serve_adapter(name, engine_name)

    def held_tokens(self, tokens: bytes, seed: int) -> int:
        """Return how many leading tokens are cached, in whole blocks. `tokens`: packed as by protocol.hashing."""
        return 0 if self._cache is None else self._cache.held_tokens(tokens, seed)

    @property
    def num_blocks(self) -> int:
        return 0 if self._cache is None else self._cache.num_blocks

    def on_kv_events(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def kv_snapshot(self) -> list[KvEvent]:
        return [] if self._cache is None else self._cache.snapshot()

    def kv_digest(self) -> Digest:
        return Digest(0, 0) if self._cache is None else self._cache.digest_now

    def on_batch(self, worker_id: WorkerId, payload: bytes) -> None:
        if self._cache is not None:
            self._cache.on_batch(worker_id, 0, payload)

    def on_reset(self, worker_id: WorkerId, payloads: Sequence[bytes]) -> None:
        if self._cache is not None:
            self._cache.on_reset(worker_id, 0, payloads)


def _runs(event: Stored, wanted: Callable[[EngineHash], bool]) -> Iterator[Stored]:
    """The parts of `event` whose blocks are wanted, each with its parent."""
    start = 0
    while start < len(event.hashes):
        if not wanted(event.hashes[start]):
            start += 1
            continue
        end = start
        while end < len(event.hashes) and wanted(event.hashes[end]):
            end += 1
        tokens = event.token_ids[start * event.block_size : end * event.block_size]
        parent = event.hashes[start - 1] if start else event.parent
        yield replace(event, hashes=event.hashes[start:end], parent=parent, token_ids=tokens)
        start = end
