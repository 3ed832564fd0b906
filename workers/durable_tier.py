"""Open a tier that outlives its worker, in a thread and for a bounded time. If that fails, the worker does without."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvmesh.kvcache.tiers.index import TierIndex
from kvmesh.kvcache.tiers.rates import TierRates
from kvmesh.kvcache.tiers.stack import TierLevel
from kvmesh.kvcache.tiers.store import TierError, TierStore
from kvmesh.protocol.messages import KvLayout
from kvmesh.protocol.tiers import Tier

log = logging.getLogger(__name__)

TIER_THREAD = "tier"  # threads that wait for storage have names that begin so
MOST_BLOCKS = 1 << 18  # each takes 1.3 KiB of the worker's memory


@dataclass(frozen=True, slots=True)
class OpenedTier:
    """A tier with the blocks that were found there. Without a store it is switched off from the start."""

    level: TierLevel
    fingerprint: bytes = b""  # of all addresses in it
    store: TierStore | None = None


def weights_known(weights: bytes) -> bytes:
    """Return the hash of an engine's weights. Raise TierError if it cannot be known: they may be any."""
    if not weights:
        raise TierError("the weights of this worker are not known")
    return weights


async def open_durable(
    what: str, tier: Tier, layout: KvLayout, open_s: float, work: Callable[[], OpenedTier]
) -> OpenedTier:
    """Return what `work` opens in a thread, or after `open_s` or a failure a tier that is switched off."""
    thread = ThreadPoolExecutor(1, thread_name_prefix=f"{TIER_THREAD} open")
    opening = thread.submit(work)
    thread.shutdown(wait=False)
    try:
        async with asyncio.timeout(open_s):
            return await asyncio.wrap_future(opening)
    except (OSError, TierError) as error:
        opening.add_done_callback(_close_late)
        problem = f"it does not answer within {open_s:g} s" if isinstance(error, TimeoutError) else str(error)
        log.error("%s is switched off: %s", what, problem)
    except BaseException:
        opening.add_done_callback(_close_late)
        raise
    return _switched_off(tier, layout)


def _switched_off(tier: Tier, layout: KvLayout) -> OpenedTier:
    level = TierLevel(TierIndex(tier, 1, layout.block_size, bool), TierRates(layout.block_bytes))
    level.health.switch_off()
    return OpenedTier(level)


def _close_late(opening: Future[OpenedTier]) -> None:
    """Close what was opened when nobody waited for it any more: another process may have the folder."""
    if not opening.cancelled() and opening.exception() is None and (store := opening.result().store) is not None:
        store.close()
