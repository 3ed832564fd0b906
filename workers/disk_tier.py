"""Open the disk tier of an engine of ours. Whatever the disk does, the worker serves: without the tier, if need be."""

import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvmesh.kvcache.tiers.address import model_fingerprint
from kvmesh.kvcache.tiers.disk import DiskStore, form_of
from kvmesh.kvcache.tiers.folder import own_folder
from kvmesh.kvcache.tiers.index import TierIndex
from kvmesh.kvcache.tiers.rates import TierRates
from kvmesh.kvcache.tiers.restore import restore
from kvmesh.kvcache.tiers.slots import header_bytes, pages
from kvmesh.kvcache.tiers.stack import TierLevel
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import KvLayout
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.durable_tier import MOST_BLOCKS, OpenedTier, open_durable, weights_known

log = logging.getLogger(__name__)

GIB = 1 << 30
SCAN_S = 30.0  # for the headers of a disk
OPEN_S = 45.0  # until a worker starts without its disk


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """A disk tier: where, how large, and whether it takes blocks of tenants with a salt."""

    path: str
    num_bytes: int
    takes_salted: bool = False


async def open_disk(settings: DiskSettings, model: str, weights: bytes, layout: KvLayout) -> OpenedTier:
    """Open a disk in a thread, for at most OPEN_S. Raise ConfigError if it is smaller than a block."""
    slot_bytes = pages(layout.block_bytes) + header_bytes(layout.block_size)
    max_blocks = min(settings.num_bytes // slot_bytes, MOST_BLOCKS)
    if max_blocks < 1:
        raise ConfigError(
            f"--kv-disk-gib gives {settings.num_bytes} bytes, a KV block of this model takes {slot_bytes} on a disk",
            hint="give at least one block",
        )
    return await open_durable(
        f"--kv-disk {settings.path}",
        Tier.DISK,
        layout,
        OPEN_S,
        partial(_open, settings, model, weights, layout, max_blocks),
    )


def _open(settings: DiskSettings, model: str, weights: bytes, layout: KvLayout, max_blocks: int) -> OpenedTier:
    fingerprint = model_fingerprint(model, layout, weights_known(weights))
    form = form_of(fingerprint, layout.block_bytes, layout.block_size, max_blocks)
    began = time.monotonic()
    folder = own_folder(Path(settings.path).expanduser().absolute(), form)
    try:
        store = DiskStore(folder, max_blocks, layout.block_bytes, scan_s=SCAN_S)
    except BaseException:
        folder.close()
        raise
    index = _restored(store, fingerprint, layout)
    log.info("%s has %d KV blocks, found in %.1f s", folder.path, len(index), time.monotonic() - began)
    level = TierLevel(index, TierRates(layout.block_bytes), keeps_salted=settings.takes_salted)
    return OpenedTier(level, fingerprint, store)


def _restored(store: DiskStore, fingerprint: bytes, layout: KvLayout) -> TierIndex:
    """Return the index of what a store has found. The store forgets what the index does not hold."""
    found, store.found = store.found, []
    index = TierIndex(Tier.DISK, store.max_blocks, layout.block_size, store.remove)
    kept = restore(index, found, fingerprint, layout.block_size)
    for block, _ in found:
        if block.address not in kept:
            store.remove(block.address)
    return index
