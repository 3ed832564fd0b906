"""Copy KV blocks between the device and the tiers below it, beside an engine's steps. The stack decides what."""

import asyncio
import logging
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple

from kvmesh.kvcache.pool import CommittedBlock
from kvmesh.kvcache.tiers.index import TierBlock
from kvmesh.kvcache.tiers.stack import BlockSave, TierLevel
from kvmesh.kvcache.tiers.store import Payload, TierCorruptError, TierError, TierIoError
from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.durable_tier import TIER_THREAD
from kvmesh.workers.metrics import TIER_LOAD_SECONDS, TIER_LOADS
from kvmesh.workers.scheduler import Scheduler, TierLoad
from kvmesh.workers.tiers import OpenTiers

log = logging.getLogger(__name__)

GRACE_S = 0.1  # for a load that was told to stop: what has come by then is kept
FLUSH_S = 3.0  # for blocks that are on their way to a disk when the engine stops
CLOSE_S = 2.0  # for copies in progress when the engine stops
LOG_EVERY_S = 60.0
REASONS: Mapping[type[TierError], str] = {TierCorruptError: "corrupt", TierIoError: "failed"}


class _Overtaken(Exception):
    """The block of the device changed while it was read."""


class _Stopped(Exception):
    """Nobody waits for a load any more."""


class _Saved(NamedTuple):
    """Report how one copy down went."""

    arrived: bool
    is_sound: bool = True  # the block of the device was the same while it was read
    is_io: bool = False  # the storage failed


@dataclass(slots=True, eq=False)
class _Loading:
    load: TierLoad
    started_s: float  # time.monotonic
    timer: asyncio.TimerHandle | None = None
    stops: bool = False  # set on the loop, read by the thread between two blocks
    arrived: int = 0  # set by the thread
    took_s: dict[Tier, float] = field(default_factory=dict)  # set by the thread: time of the copies from each tier
    error: str = ""  # set by the thread
    reason: str = ""  # set by the thread, of an error: "corrupt", "failed" or "gone"
    outcome: str = "ok"
    given_up: bool = False
    hang_timer: asyncio.TimerHandle | None = None  # since somebody was late because of it

    @property
    def request_id(self) -> RequestId:
        return self.load.sequence.request_id

    def fail(self, error: str, reason: str) -> None:
        self.error, self.reason = error, reason


class TierCopies:
    """Two threads for each tier copy, one down and one up: what comes back never waits for what goes.

    A load belongs to the slowest tier that it reads, so that nobody who needs a fast one waits for a slow one. A load
    that is late is stopped; its request computes what has not come. A tier that keeps failing is switched off.
    """

    def __init__(
        self,
        tiers: OpenTiers,
        scheduler: Scheduler,
        timeout_s: float,
        wake: Callable[[], None],
        on_news: Callable[[], None],
        least_s: Callable[[int, Tier], float] | None = None,
    ) -> None:
        """Call `wake` when there is something to plan, and `on_news` when blocks have come to a tier or left it.

        Copies of n tokens from or to a tier take `least_s(n, tier)` seconds at least, if it is given.
        """
        self.stack = tiers.stack
        self._tiers = tiers
        self._scheduler = scheduler
        self._timeout_s = timeout_s
        self._wake = wake
        self._on_news = on_news
        self._least_s = least_s
        self._down = {level.tier: _thread("save", level) for level in tiers.stack.levels}
        self._up = {level.tier: _thread("load", level) for level in tiers.stack.levels}
        self._loads: dict[RequestId, _Loading] = {}  # that somebody waits for
        self._copying: dict[Tier, _Loading] = {}  # that the thread of a tier is at: set by the thread
        self._running: set[asyncio.Future[None] | asyncio.Future[list[_Saved]]] = set()
        self._closed = False
        self._logged_s = 0.0
        self._logged_requests = 0

    def start(self, load: TierLoad) -> None:
        """Bring the blocks of a load; the scheduler is told when they are here, or will not be."""
        loop = asyncio.get_running_loop()
        loading = _Loading(load, time.monotonic())
        loading.timer = loop.call_later(load.planned.limit_s(self._timeout_s), self._on_late, loading)
        self._loads[loading.request_id] = loading
        copying = asyncio.wrap_future(self._up[load.planned.tier].submit(self._copy_up, loading))
        self._running.add(copying)
        copying.add_done_callback(partial(self._on_copied, loading))

    def abandon(self, request_id: RequestId) -> None:
        """Give the load of an aborted request up. A request without a load is no error."""
        if (loading := self._loads.get(request_id)) is not None:
            self._give_up(loading, "cancelled")

    def pump(self) -> None:
        """Copy what is to go down next. Call it after each step, and when there is nothing to compute."""
        if self._closed:
            return
        by_tier: dict[Tier, list[BlockSave]] = {}
        for save in self.stack.plan_saves():
            by_tier.setdefault(save.level.tier, []).append(save)
        for tier, saves in by_tier.items():
            self._start_saves(tier, saves)
        if time.monotonic() - self._logged_s >= LOG_EVERY_S:
            self._log_hits()

    async def clear(self, tiers: Collection[Tier]) -> None:
        """Have the stores of some tiers forget all blocks for good, after the copies in progress.

        Raise EngineError if one cannot: it is switched off.
        """
        stores = {tier: store for tier, store in self._tiers.stores.items() if tier in tiers}
        if not stores:
            return
        clearing = {tier: asyncio.wrap_future(self._down[tier].submit(stores[tier].clear)) for tier in stores}
        done, _ = await asyncio.wait(clearing.values(), timeout=self._timeout_s)
        for tier, one in clearing.items():
            problem = one.exception() if one in done else f"it takes longer than {self._timeout_s:g} s"
            if problem is not None:
                self.stack.switch_off(next(level for level in self.stack.levels if level.tier is tier))
                raise EngineError(
                    f"the {tier.name.lower()} tier cannot forget its blocks and is switched off: {problem}",
                    hint="remove its files before the worker starts again",
                )

    async def close(self) -> bool:
        """End all copies; what was to go to a disk has FLUSH_S to get there.

        False: a copy hangs, and may still read or write the KV cache.
        """
        await self._flush()
        self._closed = True
        for loading in self._loads.values():
            loading.stops = True
            if loading.timer is not None:
                loading.timer.cancel()
        if self._running:
            await asyncio.wait(list(self._running), timeout=CLOSE_S)
        for thread in (*self._down.values(), *self._up.values()):
            thread.shutdown(wait=False, cancel_futures=True)
        if self._running:
            return False
        for store in self._tiers.stores.values():
            store.close()
        return True

    async def _flush(self) -> None:
        """Copy what is planned for tiers that outlive the process, for a bounded time."""
        if not self.stack.has_durable_work:
            return
        ends_s = time.monotonic() + FLUSH_S
        self.pump()
        while self.stack.has_durable_work and time.monotonic() < ends_s and self._running:
            await asyncio.wait(list(self._running), timeout=ends_s - time.monotonic(), return_when=FIRST_COMPLETED)
            await asyncio.sleep(0)  # their callbacks plan the next ones

    # --- in threads ------------------------------------------------------------------------------------

    def _copy_up(self, loading: _Loading) -> None:
        self._copying[loading.load.planned.tier] = loading
        into = iter(loading.load.into)
        for level, pieces in groupby(loading.load.planned.pieces, key=lambda piece: piece.level):
            began = time.perf_counter()
            try:
                self._copy_up_from(level, [piece.block.address for piece in pieces], into, loading)
            except _Stopped:
                return
            except TierError as error:
                loading.fail(str(error), REASONS.get(type(error), "gone"))
                return
            except Exception as error:  # a bug met by one load: the rest of its prompt is computed
                log.exception("a load from a KV tier failed")
                loading.fail(f"{type(error).__name__}: {error}", "failed")
                return
            finally:
                before_s = loading.took_s.get(level.tier, 0.0)
                loading.took_s[level.tier] = before_s + time.perf_counter() - began

    def _copy_up_from(
        self, level: TierLevel, addresses: Sequence[bytes], into: Iterator[int], loading: _Loading
    ) -> None:
        def take(payload: Payload) -> None:
            if loading.stops:
                raise _Stopped
            self._tiers.blocks.write(next(into), payload)
            loading.arrived += 1

        if loading.stops:
            raise _Stopped
        self._tiers.stores[level.tier].load(addresses, take)

    def _copy_down(self, saves: Sequence[BlockSave]) -> list[_Saved]:
        """Copy blocks to one tier. What has changed meanwhile must not even be written to a disk."""
        level = saves[0].level
        sources = {save.block.address: save.source for save in saves}
        if not level.health.is_writable:
            return [_Saved(arrived=False)] * len(saves)
        try:
            outcomes = self._tiers.stores[level.tier].store(
                [save.block for save in saves], partial(self._fill, sources)
            )
        except Exception:  # a bug met by these copies: the blocks are computed when they are asked for again
            log.exception("copies to a KV tier failed")
            return [_Saved(arrived=False, is_io=True)] * len(saves)
        for problem in {str(error): error for error in outcomes if not isinstance(error, _Overtaken | None)}.values():
            log.warning("KV blocks are not kept: %s", problem)
        return [_saved(error) for error in outcomes]

    def _fill(self, sources: Mapping[bytes, CommittedBlock], block: TierBlock, payload: Payload) -> None:
        source, pool = sources[block.address], self._scheduler.pool
        if pool.is_unchanged(source):
            self._tiers.blocks.read(source.block_id, payload)
        if not pool.is_unchanged(source):  # the loop changes the version before anybody writes to the block
            raise _Overtaken

    # --- up, on the loop -------------------------------------------------------------------------------

    def _on_copied(self, loading: _Loading, copying: "asyncio.Future[None]") -> None:
        self._running.discard(copying)
        level = loading.load.planned.slowest
        if self._copying.get(level.tier) is loading:
            del self._copying[level.tier]
        if loading.hang_timer is not None:
            loading.hang_timer.cancel()
            level.health.hanging -= 1
        if self._closed or copying.cancelled():
            return
        if not loading.given_up:
            parts = loading.load.planned.parts(loading.arrived)
            least_s = {level.tier: self._copy_s(blocks, level.tier) for level, blocks in parts}
            if (rest_s := loading.started_s + sum(least_s.values()) - time.monotonic()) > 0:
                for tier, seconds in least_s.items():
                    loading.took_s[tier] = max(loading.took_s[tier], seconds)
                asyncio.get_running_loop().call_later(rest_s, self._end, loading)
                return
        self._end(loading)

    def _copy_s(self, blocks: int, tier: Tier) -> float:
        """Return the least seconds that so many blocks take."""
        return 0.0 if self._least_s is None else self._least_s(blocks * self._scheduler.pool.block_size, tier)

    def _end(self, loading: _Loading) -> None:
        load = loading.load
        if self._closed:
            return
        if loading.given_up:
            is_late = loading.outcome != "cancelled"
            waited_s = {load.planned.tier: time.monotonic() - loading.started_s} if is_late else {}
            self.stack.load_ended(load.planned, 0, waited_s, copied=loading.arrived)
            self._scheduler.pull_let_go(load)
        else:
            if loading.error:
                loading.outcome = "failed"
                log.warning("request %s computes the rest of its prompt: %s", loading.request_id, loading.error)
            elif loading.arrived < len(load.into):
                loading.outcome = "late"
            self._forget(loading)
            self._note_health(loading)
            self.stack.load_ended(load.planned, loading.arrived, loading.took_s, is_broken=bool(loading.error))
            self._scheduler.load_ended(load, loading.arrived)
        self._on_news()
        self._wake()

    def _note_health(self, loading: _Loading) -> None:
        for level, _ in loading.load.planned.parts(loading.arrived):
            level.health.note_read(is_good=True)
        if loading.error:
            level = loading.load.planned.pieces[loading.arrived].level
            level.counts[f"unreadable_{loading.reason}"] += 1
            if loading.reason == "failed":
                self._note_failed_read(level)

    def _note_failed_read(self, level: TierLevel) -> None:
        if level.health.note_read(is_good=False):
            log.error("the %s tier of the KV cache cannot be read and is switched off", level.tier.name.lower())
            self.stack.switch_off(level)
            self._on_news()

    def _on_late(self, loading: _Loading) -> None:
        """Stop a late load. What has come is kept, unless the load does not even stop."""
        loading.stops = True
        loading.timer = asyncio.get_running_loop().call_later(GRACE_S, self._give_up, loading, "late")

    def _give_up(self, loading: _Loading, outcome: str) -> None:
        loading.stops = loading.given_up = True
        loading.outcome = outcome
        self._forget(loading)
        if outcome == "late":
            self._blame(loading)
        self._scheduler.load_given_up(loading.load)
        self._wake()

    def _blame(self, late: _Loading) -> None:
        """Note what a load was late for: itself, or the one that it waits for. One that hangs counts once.

        While that one has not ended, nobody queues behind it; if it does not end, its tier is switched off.
        """
        level = late.load.planned.slowest
        copied = self._copying.get(level.tier)
        hanging = late if copied is None else copied
        if hanging.hang_timer is None:
            level.health.hanging += 1
            patience_s = self._timeout_s + GRACE_S
            hanging.hang_timer = asyncio.get_running_loop().call_later(patience_s, self._on_hung, level)
        if copied is late and not late.arrived:
            self._note_failed_read(level)

    def _on_hung(self, level: TierLevel) -> None:
        if level.health.is_readable:
            log.error("a read hangs: the %s tier of the KV cache is switched off", level.tier.name.lower())
            self.stack.switch_off(level)
            self._on_news()

    def _forget(self, loading: _Loading) -> None:
        """Nobody waits for a load any more."""
        if loading.timer is not None:
            loading.timer.cancel()
        del self._loads[loading.request_id]
        tier = loading.load.planned.tier.name.lower()
        TIER_LOADS.labels(tier, loading.outcome).inc()
        TIER_LOAD_SECONDS.labels(tier).observe(time.monotonic() - loading.started_s)

    # --- down, on the loop -----------------------------------------------------------------------------

    def _start_saves(self, tier: Tier, saves: Sequence[BlockSave]) -> None:
        copying = asyncio.wrap_future(self._down[tier].submit(self._copy_down, saves))
        self._running.add(copying)
        timer = None
        if tier is not Tier.HOST:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._timeout_s, self._on_saves_late, saves[0].level)
        copying.add_done_callback(partial(self._on_saved, saves, time.monotonic(), timer))

    def _on_saves_late(self, level: TierLevel) -> None:
        """Write no more to a tier that hangs. Its copies stay in flight until they end."""
        if level.health.stop_writes():
            self._log_no_writes(level, f"a write takes longer than {self._timeout_s:g} s")

    @staticmethod
    def _log_no_writes(level: TierLevel, problem: str) -> None:
        log.error("the %s tier of the KV cache takes no more blocks: %s", level.tier.name.lower(), problem)

    def _on_saved(
        self,
        saves: Sequence[BlockSave],
        began_s: float,
        timer: asyncio.TimerHandle | None,
        copying: "asyncio.Future[list[_Saved]]",
    ) -> None:
        self._running.discard(copying)
        if timer is not None:
            timer.cancel()
        if self._closed or copying.cancelled():
            return
        if (rest_s := began_s + self._copy_s(len(saves), saves[0].level.tier) - time.monotonic()) > 0:
            asyncio.get_running_loop().call_later(rest_s, self._end_saves, saves, copying.result())
        else:
            self._end_saves(saves, copying.result())

    def _end_saves(self, saves: Sequence[BlockSave], results: Sequence[_Saved]) -> None:
        if self._closed:
            return
        for save, result in zip(saves, results, strict=True):
            self.stack.saved(save, arrived=result.arrived, is_sound=result.is_sound)
        is_bad = any(result.is_io for result in results)
        if is_bad or any(result.arrived for result in results):
            level = saves[0].level
            if level.health.note_write(is_good=not is_bad):
                self._log_no_writes(level, "it cannot be written")
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


def _saved(error: Exception | None) -> _Saved:
    is_overtaken = isinstance(error, _Overtaken)
    is_io = isinstance(error, TierIoError) or not isinstance(error, TierError | _Overtaken | None)
    return _Saved(arrived=error is None, is_sound=not is_overtaken, is_io=is_io)


def _thread(work: str, level: TierLevel) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=f"{TIER_THREAD} {work} {level.tier.name.lower()}")
