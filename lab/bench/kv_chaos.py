"""Run requests, aborts, resets and damaged loads over one engine, and compare an index of its events with it."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvmesh.kvcache.tiers.store import Payload, TierCorruptError, TierStore
from kvmesh.lab.bench.kv_engines import BenchedEngine, KvBenchConfig, running
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.tiers import Tier
from kvmesh.router.index import Holder, PlainIndex
from kvmesh.workers.disk_tier import DiskSettings
from kvmesh.workers.tiers import TierSettings

PROMPTS = 8  # of which pairs share their first half; the device holds two and a half
ACTS = 8  # in each round of the benchmark
DAMAGED = 0.05  # of the blocks that are loaded
HOST_PROMPTS = 3  # that host memory holds
DISK_PROMPTS = 8


class DamagedStore:
    """A store that now and then finds a block damaged."""

    def __init__(self, store: TierStore, seed: int) -> None:
        self._store = store
        self._random = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def load(self, addresses: Sequence[bytes], take: Callable[[Payload], object]) -> None:
        def take_some(payload: Payload) -> None:
            if self._random.random() < DAMAGED:
                raise TierCorruptError("damaged on purpose")
            take(payload)

        self._store.load(addresses, take_some)


async def index_equal(config: KvBenchConfig, block_bytes: int, folder: Path, seed: int) -> bool:
    """Return whether an index that followed the events of the device, host memory and a disk equals them at the end.

    So has to be one that is rebuilt from a snapshot.
    """
    prompt_bytes = config.isl_tokens // 16 * block_bytes
    disk = DiskSettings(str(folder / "chaos"), DISK_PROMPTS * prompt_bytes)
    index, rebuilt, holder = PlainIndex(), PlainIndex(), Holder(WorkerId("bench"), 0)
    async with running(config, TierSettings(HOST_PROMPTS * prompt_bytes, disk=disk)) as engine:
        engine.on_kv_events(lambda events: index.apply(holder, events))
        side, chance = BenchedEngine(engine), random.Random(seed)
        stores: Any = engine._copies._tiers.stores  # type: ignore[union-attr]
        for tier, store in list(stores.items()):
            stores[tier] = DamagedStore(store, seed + tier)
        logging.getLogger("kvmesh.workers.tier_copies").setLevel(logging.ERROR)  # damage is no news here
        for _ in range(ACTS * config.rounds):
            await _act(side, chance, config.isl_tokens)
        await side.rest()
        digest = engine.kv_digest()
        rebuilt.apply(holder, engine.kv_snapshot())
    return digest == index.digest(holder) == rebuilt.digest(holder) and digest.blocks > 0


async def _act(side: BenchedEngine, chance: random.Random, isl_tokens: int) -> None:
    """Ask for two prompts at once, leave one of them early now and then, and now and then forget a tier."""
    asked = [asyncio.create_task(side.ask(_prompt(chance.randrange(PROMPTS), isl_tokens), 4)) for _ in range(2)]
    if chance.random() < 0.3:
        await asyncio.sleep(chance.random() / 50)
        asked[0].cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    if chance.random() < 0.1:
        with suppress(InvalidRequestError):  # it is being read
            await side.engine.reset_cache([chance.choice([Tier.DEVICE, Tier.HOST, Tier.DISK])])


def _prompt(number: int, isl_tokens: int) -> list[int]:
    half = isl_tokens // 2
    first, second = [number // 2 + 1] * half, [number + 100] * (isl_tokens - half)
    return [token + place % 1000 for place, token in enumerate([*first, *second])]
