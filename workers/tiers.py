"""Open the tiers of an engine of ours as its settings say, and say how they are."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.kvcache.memory import KvRegion
from kvmesh.kvcache.pool import BlockPool
from kvmesh.kvcache.tiers.address import model_fingerprint
from kvmesh.kvcache.tiers.host import HostStore
from kvmesh.kvcache.tiers.index import TierIndex
from kvmesh.kvcache.tiers.peers import PeerPrefixes
from kvmesh.kvcache.tiers.rates import TierRates
from kvmesh.kvcache.tiers.stack import Offload, TierLevel, TierStack
from kvmesh.kvcache.tiers.store import DeviceBlocks, HostRegionBlocks, TierStore
from kvmesh.protocol.errors import ConfigError, InvalidRequestError
from kvmesh.protocol.messages import CardTier, KvLayout
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.disk_tier import DiskSettings
from kvmesh.workers.durable_tier import OpenedTier
from kvmesh.workers.engine import TierUse
from kvmesh.workers.executor import CopiesBlocks, Executor, Row
from kvmesh.workers.scheduler import Scheduler
from kvmesh.workers.shared_tier import SharedSettings

MIB = 1 << 20
IN_FLIGHT_BYTES = 64 * MIB  # of copies that go down at a time
LEAST_IN_FLIGHT = 4  # blocks, however large they are


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The tiers that an engine is to have."""

    host_bytes: int = 0
    offload: Offload = "ahead"
    disk: DiskSettings | None = None
    shared: SharedSettings | None = None


NO_TIERS = TierSettings()


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """The tiers of one engine, or of one rank of it."""

    stack: TierStack
    stores: Mapping[Tier, TierStore]  # none for a tier that could not be opened
    blocks: DeviceBlocks


@dataclass(frozen=True, slots=True)
class TierReport:
    """Report how fast the tiers of an engine are, how fast it computes and pulls; 0: not measured yet."""

    tiers: tuple[CardTier, ...] = ()
    prefill_token_s: float = 0.0
    pull_block_s: float = 0.0  # from peers
    pull_latency_s: float = 0.0


def open_tiers(
    settings: TierSettings,
    model: str,
    layout: KvLayout,
    region: KvRegion,
    pool: BlockPool,
    executor: Executor,
    durable: Sequence[OpenedTier] = (),
) -> OpenTiers | None:
    """Return the tiers, None if the settings ask for none. Raises ConfigError if they cannot be had."""
    opened = [_open_host(settings.host_bytes, layout)] if settings.host_bytes else []
    opened += [(tier.level, tier.store) for tier in durable]
    if not opened:
        return None
    levels = [level for level, _ in opened]
    stores = {level.tier: store for level, store in opened if store is not None}
    stack = TierStack(
        pool,
        levels,
        next((tier.fingerprint for tier in durable if tier.store is not None), model_fingerprint(model, layout)),
        offload=settings.offload,
        max_in_flight=max(LEAST_IN_FLIGHT, IN_FLIGHT_BYTES // layout.block_bytes),
    )
    return OpenTiers(stack, stores, _device_blocks(region, executor))


def _open_host(num_bytes: int, layout: KvLayout) -> tuple[TierLevel, TierStore | None]:
    max_blocks = num_bytes // layout.block_bytes
    if max_blocks < 1:
        raise ConfigError(
            f"--kv-host-mib gives {num_bytes} bytes, a KV block of this model has {layout.block_bytes}",
            hint="give at least one block, or 0 for no host memory",
        )
    store = HostStore(max_blocks, layout.block_bytes)
    index = TierIndex(Tier.HOST, max_blocks, layout.block_size, store.remove)
    return TierLevel(index, TierRates(layout.block_bytes)), store


def _device_blocks(region: KvRegion, executor: Executor) -> DeviceBlocks:
    if region.device == "cpu":
        return HostRegionBlocks(region)
    if isinstance(executor, CopiesBlocks):
        return executor.device_blocks()
    raise ConfigError(
        f"the KV cache is on {region.device}, from where this engine copies nothing",
        hint="set no tiers: --kv-host-mib 0, no --kv-disk, no --kv-shared",
    )


def loads_of(tiers: OpenTiers) -> tuple[TierUse, ...]:
    """Return what the metrics say of the tiers."""
    return tuple(_use_of(level, tiers) for level in tiers.stack.levels)


def _use_of(level: TierLevel, tiers: OpenTiers) -> TierUse:
    store = tiers.stores.get(level.tier)
    return TierUse(
        tier=level.tier.name.lower(),
        blocks=len(level.index),
        used_bytes=level.index.used_blocks * level.rates.block_bytes,
        limit_bytes=level.index.max_blocks * level.rates.block_bytes,
        block_bytes=level.rates.block_bytes,
        counts=dict(level.counts),
        hit_shares=tiers.stack.window.shares(),
        ios={} if store is None else dict(store.ios),
        is_readable=level.health.is_readable,
        is_writable=level.health.is_writable,
    )


def check_reset(tiers: Collection[Tier], stack: TierStack | None) -> None:
    """Raise InvalidRequestError if there is no such tier, or if it is being read."""
    levels = {} if stack is None else {level.tier: level for level in stack.levels}
    for tier in tiers:
        if tier is Tier.DEVICE:
            continue
        if (level := levels.get(tier)) is None:
            has = ", ".join(["device", *[one.name.lower() for one in levels]])
            raise InvalidRequestError(f"this worker has no {tier.name.lower()} tier", hint=f"it has {has}")
        if level.rates.backlog_bytes:
            raise InvalidRequestError(f"blocks of the {tier.name.lower()} tier are being read", hint="try again")


def note_prompts(scheduler: Scheduler, rows: Sequence[Row], took_s: float) -> None:
    """Learn from a step how long computing takes."""
    knows = scheduler.tiers or scheduler.peers
    if knows is not None:
        prompts = [len(row.token_ids) for row in rows if len(row.token_ids) > 1]
        knows.compute.note_step(sum(prompts), len(rows) - len(prompts), took_s)


def report_of(stack: TierStack | None, peers: PeerPrefixes | None) -> TierReport:
    """Return what a card says of tiers and peers."""
    compute = stack.compute if stack is not None else None if peers is None else peers.compute
    pull_block_s, pull_latency_s = (0.0, 0.0) if peers is None else peers.measured(time.monotonic())
    return TierReport(
        tuple(
            CardTier(
                tier=int(level.tier),
                blocks=level.index.max_blocks,
                block_s=level.rates.block_s,
                latency_s=level.rates.line.latency_s,
            )
            for level in (() if stack is None else stack.levels)
            if level.health.is_readable
        ),
        0.0 if compute is None else compute.token_s,
        pull_block_s,
        pull_latency_s,
    )
