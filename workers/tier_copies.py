"""Copy KV blocks between the device and the tiers below it, beside an engine's steps. The stack decides what."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from kvcache.tiers.stack import BlockSave
from kvcache.tiers.store import TierError
from protocol.ids import RequestId
from workers.executor import Row
from workers.metrics import TIER_LOAD_SECONDS, TIER_LOADS
from workers.scheduler import Scheduler, TierLoad
from workers.tiers import OpenTiers

log = logging.getLogger(__name__)

GRACE_S = 0.1  # for a load that was told to stop: what has come by then is kept
CLOSE_S = 2.0  # for copies in progress when the engine stops
LOG_EVERY_S = 60.0


@dataclass(slots=True, eq=False)
class _Loading:
    load: TierLoad
    started_s: float  # time.monotonic
    timer: asyncio.TimerHandle | None = None
    stops: bool = False  # set on the loop, read by the thread between two blocks
    arrived: int = 0  # set by the thread
    copy_s: float = 0.0  # set by the thread: time of the copies, without waiting for those before
    error: str = ""  # set by the thread
    outcome: str = "ok"
    given_up: bool = False

    @property
    def request_id(self) -> RequestId:
        return self.load.sequence.request_id


class TierCopies:
    """Two threads copy, one down and one up: what comes back never waits for what goes.

    A load that is late is stopped; its request computes what has not come.
    """

    def __init__(
        self,
        tiers: OpenTiers,
        scheduler: Scheduler,
        timeout_s: float,
        wake: Callable[[], None],
        on_news: Callable[[], None],
        least_s: Callable[[int], float] | None = None,
    ) -> None:
        """Call `wake` when there is something to plan, and `on_news` when blocks have come to a tier or left it.

        Copies of n tokens take `least_s(n)` seconds at least, if it is given.
        """
        self.stack = tiers.stack
        self._tiers = tiers
        self._scheduler = scheduler
        self._timeout_s = timeout_s
        self._wake = wake
        self._on_news = on_news
        self._least_s = least_s
        self._down = ThreadPoolExecutor(1, thread_name_prefix="tier save")
        self._up = ThreadPoolExecutor(1, thread_name_prefix="tier load")
        self._loads: dict[RequestId, _Loading] = {}  # that somebody waits for
        self._running: set[asyncio.Future[None] | asyncio.Future[list[bool]]] = set()
        self._closed = False
        self._logged_s = 0.0
        self._logged_requests = 0

    def start(self, load: TierLoad) -> None:
        """Bring the blocks of a load; the scheduler is told when they are here, or will not be."""
        loop = asyncio.get_running_loop()
        loading = _Loading(load, time.monotonic())
        loading.timer = loop.call_later(load.planned.limit_s(self._timeout_s), self._on_late, loading)
        self._loads[loading.request_id] = loading
        copying = asyncio.wrap_future(self._up.submit(self._copy_up, loading))
        self._running.add(copying)
        copying.add_done_callback(partial(self._on_copied, loading))

    def abandon(self, request_id: RequestId) -> None:
        """Give the load of an aborted request up. A request without a load is no error."""
        if (loading := self._loads.get(request_id)) is not None:
            self._give_up(loading, "cancelled")

    def stepped(self, rows: Sequence[Row], took_s: float) -> None:
        """Learn from a step how long computing takes, and copy what is to go down next."""
        prompts = [len(row.token_ids) for row in rows if len(row.token_ids) > 1]
        self.stack.compute.note_step(sum(prompts), len(rows) - len(prompts), took_s)
        self.pump()

    def pump(self) -> None:
        """Copy what is to go down next. Call it when there is nothing to compute, too."""
        if self._closed:
            return
        saves = self.stack.plan_saves()
        if saves:
            copying = asyncio.wrap_future(self._down.submit(self._copy_down, saves))
            self._running.add(copying)
            copying.add_done_callback(partial(self._on_saved, saves, time.monotonic()))
        if time.monotonic() - self._logged_s >= LOG_EVERY_S:
            self._log_hits()

    async def close(self) -> bool:
        """End all copies. False: one hangs, and may still read or write the KV cache."""
        self._closed = True
        for loading in self._loads.values():
            loading.stops = True
            if loading.timer is not None:
                loading.timer.cancel()
        if self._running:
            await asyncio.wait(list(self._running), timeout=CLOSE_S)
        self._down.shutdown(wait=False, cancel_futures=True)
        self._up.shutdown(wait=False, cancel_futures=True)
        if self._running:
            return False
        for store in self._tiers.stores.values():
            store.close()
        return True

    # --- in threads ------------------------------------------------------------------------------------

    def _copy_up(self, loading: _Loading) -> None:
        blocks, stores = self._tiers.blocks, self._tiers.stores
        began = time.perf_counter()
        try:
            for (level, block), block_id in zip(loading.load.planned.pieces, loading.load.into, strict=True):
                if loading.stops:
                    return
                stores[level.tier].load(block.address, partial(blocks.write, block_id))
                loading.arrived += 1
        except TierError as error:
            loading.error = str(error)
        except Exception as error:  # a bug met by one load: the rest of its prompt is computed
            log.exception("a load from a KV tier failed")
            loading.error = f"{type(error).__name__}: {error}"
        finally:
            loading.copy_s = time.perf_counter() - began

    def _copy_down(self, saves: Sequence[BlockSave]) -> list[bool]:
        return [self._save(save) for save in saves]

    def _save(self, save: BlockSave) -> bool:
        try:
            store = self._tiers.stores[save.level.tier]
            store.store(save.block.address, partial(self._tiers.blocks.read, save.source.block_id))
        except TierError as error:
            log.warning("a KV block is not kept: %s", error)
            return False
        except Exception:  # a bug met by one copy: its block is computed when it is asked for again
            log.exception("a copy to a KV tier failed")
            return False
        return True

    # --- on the loop -----------------------------------------------------------------------------------

    def _on_copied(self, loading: _Loading, copying: "asyncio.Future[None]") -> None:
        self._running.discard(copying)
        if self._closed or copying.cancelled():
            return
        if self._least_s is not None:
            tokens = loading.arrived * self._scheduler.pool.block_size
            least_s = self._least_s(tokens)
            rest_s = loading.started_s + least_s - time.monotonic()
            if rest_s > 0 and not loading.given_up:
                loading.copy_s = max(loading.copy_s, least_s)
                asyncio.get_running_loop().call_later(rest_s, self._end, loading)
                return
        self._end(loading)

    def _end(self, loading: _Loading) -> None:
        load = loading.load
        if self._closed:
            return
        if loading.given_up:
            waited_s = 0.0 if loading.outcome == "cancelled" else time.monotonic() - loading.started_s
            self.stack.load_ended(load.planned, 0, waited_s)
            self._scheduler.pull_let_go(load)
        else:
            if loading.error:
                loading.outcome = "failed"
                log.warning("request %s computes the rest of its prompt: %s", loading.request_id, loading.error)
            elif loading.arrived < len(load.into):
                loading.outcome = "late"
            self._forget(loading)
            self.stack.load_ended(load.planned, loading.arrived, loading.copy_s, is_broken=bool(loading.error))
            self._scheduler.load_ended(load, loading.arrived)
        self._on_news()
        self._wake()

    def _on_late(self, loading: _Loading) -> None:
        """Stop a late load. What has come is kept, unless the load does not even stop."""
        loading.stops = True
        loading.timer = asyncio.get_running_loop().call_later(GRACE_S, self._give_up, loading, "late")

    def _give_up(self, loading: _Loading, outcome: str) -> None:
        loading.stops = loading.given_up = True
        loading.outcome = outcome
        self._forget(loading)
        self._scheduler.load_given_up(loading.load)
        self._wake()

    def _forget(self, loading: _Loading) -> None:
        """Nobody waits for a load any more."""
        if loading.timer is not None:
            loading.timer.cancel()
        del self._loads[loading.request_id]
        tier = loading.load.planned.tier.name.lower()
        TIER_LOADS.labels(tier, loading.outcome).inc()
        TIER_LOAD_SECONDS.labels(tier).observe(time.monotonic() - loading.started_s)

    def _on_saved(self, saves: Sequence[BlockSave], began_s: float, copying: "asyncio.Future[list[bool]]") -> None:
        self._running.discard(copying)
        if self._closed or copying.cancelled():
            return
        if self._least_s is not None:
            least_s = self._least_s(len(saves) * self._scheduler.pool.block_size)
            if (rest_s := began_s + least_s - time.monotonic()) > 0:
                asyncio.get_running_loop().call_later(rest_s, self._end_saves, saves, copying.result())
                return
        self._end_saves(saves, copying.result())

    def _end_saves(self, saves: Sequence[BlockSave], results: Sequence[bool]) -> None:
        if self._closed:
            return
        for save, arrived in zip(saves, results, strict=True):
            self.stack.saved(save, arrived=arrived)
        self._on_news()
        self.pump()

    def _log_hits(self) -> None:
        self._logged_s = time.monotonic()
        window = self.stack.window
        if window.seen == self._logged_requests:
            return
        self._logged_requests = window.seen
        on_device, below = window.shares()
        log.info(
            "of the prompt blocks of the last requests %.0f %% were on the device, %.0f %% came from lower tiers",
            100 * on_device,
            100 * below,
        )
