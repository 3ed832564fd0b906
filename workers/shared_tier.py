"""Open shared storage for an engine of ours, and follow what other workers store there."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from kvmesh.kvcache.tiers.address import model_fingerprint
from kvmesh.kvcache.tiers.collect import SharedLimits
from kvmesh.kvcache.tiers.health import MOST_FAILURES
from kvmesh.kvcache.tiers.index import TierIndex
from kvmesh.kvcache.tiers.objects import BucketStorage, FolderObjects, Objects
from kvmesh.kvcache.tiers.place import FolderPlace, place_of
from kvmesh.kvcache.tiers.rates import TierRates
from kvmesh.kvcache.tiers.restore import restore
from kvmesh.kvcache.tiers.shared import SharedNews, SharedStore
from kvmesh.kvcache.tiers.stack import TierLevel, TierStack
from kvmesh.kvcache.tiers.store import TierError, TierStore
from kvmesh.mesh.extensions import load
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import KvLayout
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.durable_tier import MOST_BLOCKS, TIER_THREAD, OpenedTier, open_durable, weights_known

log = logging.getLogger(__name__)

OPEN_S = 45.0  # until a worker starts without its shared storage
READ_S = 30.0  # of that, for heads of objects
LISTING_SHARE = 0.02  # of the time, at most, that is spent on listings
AT_ONCE = 256  # blocks that are added to the index before others have a turn
LEAST_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """Shared storage: where, how large, for how long, and whether it takes blocks of tenants with a salt."""

    place: str
    num_bytes: int
    age_s: float = 7 * 86400.0
    takes_salted: bool = False
    timeout_s: float = 10.0  # of one call to the storage
    endpoint: str = ""  # of an S3 server; "": that of the environment


def open_objects(settings: SharedSettings) -> Objects:
    """Return the storage that `--kv-shared` names. Raise ConfigError, and TierIoError."""
    place = place_of(settings.place)
    if isinstance(place, FolderPlace):
        return FolderObjects(Path(place.path).expanduser().absolute())
    for storage in load("store"):
        return cast(BucketStorage, storage).open(place, settings.endpoint, settings.timeout_s)
    raise ConfigError(f"nothing here opens --kv-shared {settings.place}", hint="set --kv-shared to dir:PATH")


async def open_shared(settings: SharedSettings, model: str, weights: bytes, layout: KvLayout) -> OpenedTier:
    """Open shared storage in a thread, for at most OPEN_S. Raise ConfigError if its settings cannot be right."""
    max_blocks = min(settings.num_bytes // layout.block_bytes, MOST_BLOCKS)
    if max_blocks < LEAST_BLOCKS:
        raise ConfigError(
            f"--kv-shared-gib gives {settings.num_bytes} bytes, a KV block of this model takes {layout.block_bytes}",
            hint=f"give at least {LEAST_BLOCKS} blocks",
        )
    return await open_durable(
        f"--kv-shared {settings.place}",
        Tier.SHARED,
        layout,
        OPEN_S,
        partial(_open, settings, model, weights, layout, max_blocks),
    )


def _open(settings: SharedSettings, model: str, weights: bytes, layout: KvLayout, max_blocks: int) -> OpenedTier:
    began = time.monotonic()
    fingerprint = model_fingerprint(model, layout, weights_known(weights))
    limits = SharedLimits(settings.num_bytes, settings.age_s)
    store = SharedStore(open_objects(settings), fingerprint, layout.block_bytes, max_blocks, limits)
    try:
        news = store.refresh(began + READ_S)
    except BaseException:
        store.close()
        raise
    index = TierIndex(Tier.SHARED, max_blocks, layout.block_size, store.remove)
    take_news(index, store, news, fingerprint, layout.block_size)
    log.info("%s has %d KV blocks, found in %.1f s", settings.place, len(index), time.monotonic() - began)
    level = TierLevel(index, TierRates(layout.block_bytes), keeps_salted=settings.takes_salted)
    return OpenedTier(level, fingerprint, store)


def take_news(index: TierIndex, store: SharedStore, news: SharedNews, fingerprint: bytes, block_size: int) -> None:
    """Have the index hold what a listing has shown. The store forgets what the index does not take."""
    if news.is_cleared:
        index.drop_all()
    for name, address in news.gone:
        block = index.get(name)
        if block is not None and block.address == address and not store.find(address):
            index.drop(block)
    kept = restore(index, news.found, fingerprint, block_size, evicts=True)
    for block, _ in news.found:
        if block.address not in kept and not index.holds(block.name, block.address):
            store.remove(block.address)


class FollowedStorage:
    """Lists shared storage again and again while the worker serves, in a thread of its own.

    Storage that fails or hangs three times one after the other is switched off until the worker starts again.
    """

    def __init__(
        self, stack: TierStack, level: TierLevel, store: SharedStore, timeout_s: float, on_news: Callable[[], None]
    ) -> None:
        """Call `on_news` when blocks have come or gone."""
        self._stack = stack
        self._level = level
        self._store = store
        self._timeout_s = timeout_s
        self._on_news = on_news
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{TIER_THREAD} list shared")
        self._listing: Future[SharedNews] | None = None
        self._still = asyncio.Lock()  # the storage is not listed and reset at the same time
        self._failures = 0
        self._task = asyncio.create_task(self._follow(), name="list shared storage")

    @classmethod
    def of(
        cls, stack: TierStack, stores: Mapping[Tier, TierStore], timeout_s: float, on_news: Callable[[], None]
    ) -> "FollowedStorage | None":
        """Follow the shared storage of a stack, None if it has none."""
        store = stores.get(Tier.SHARED)
        level = next((level for level in stack.levels if level.tier is Tier.SHARED), None)
        if level is None or not isinstance(store, SharedStore):
            return None
        return cls(stack, level, store, timeout_s, on_news)

    def still(self) -> asyncio.Lock:
        """Return what keeps the storage from being listed while it is held."""
        return self._still

    async def refresh(self) -> float:
        """List the storage once, and take what it shows; return how long the listing took."""
        async with self._still:
            began = time.monotonic()
            if self._listing is None or self._listing.done():
                self._listing = self._thread.submit(self._store.refresh, began + self._timeout_s / 2)
            try:
                async with asyncio.timeout(self._timeout_s):
                    news = await asyncio.shield(asyncio.wrap_future(self._listing))
            except (TierError, TimeoutError) as error:
                self._note_failure(str(error) or f"no listing within {self._timeout_s:g} s")
                return time.monotonic() - began
            took_s = time.monotonic() - began
            self._failures = 0
            await self._take(news)
        return took_s

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _follow(self) -> None:
        took_s = 0.0
        while self._level.health.is_readable:
            await asyncio.sleep(max(self._store.list_every_s, took_s / LISTING_SHARE))
            try:
                took_s = await self.refresh()
            except Exception as error:  # a bug met by one listing: the worker goes on
                log.exception("shared storage is not listed")
                self._note_failure(f"{type(error).__name__}: {error}")

    async def _take(self, news: SharedNews) -> None:
        """Take news in parts, so that nobody waits long for the loop: parents come before their children."""
        self._level.counts["collected_bytes"] += news.collected_bytes
        if not (news.found or news.gone or news.is_cleared):
            return
        rest = news
        while True:
            part = rest._replace(found=rest.found[:AT_ONCE])
            rest = SharedNews(rest.found[AT_ONCE:], [], is_cleared=False)
            take_news(self._level.index, self._store, part, self._stack.fingerprint, self._stack.pool.block_size)
            if not rest.found:
                break
            await asyncio.sleep(0)
        self._on_news()

    def _note_failure(self, problem: str) -> None:
        self._failures += 1
        log.warning("shared storage is not listed: %s", problem)
        if self._failures == MOST_FAILURES:
            log.error("the shared tier of the KV cache cannot be listed and is switched off")
            self._stack.switch_off(self._level)
            self._on_news()
