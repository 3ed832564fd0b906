"""Predict what a worker's cache will hold because a request was sent there. Pure; the time is a parameter.

Predictions are used twice. For workers without KV events they replace the index: a prediction lives about as long as
an unused prefix in such a cache, and no holder is believed to have more blocks than its pool. For all other workers
they fill the gap until the request's own KV events arrive, and live for seconds. So requests with one prefix that come
in a burst follow each other.
"""

from collections import OrderedDict
from collections.abc import Mapping

from msgspec import Struct

from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import WorkerCard
from kvmesh.router.chains import ChainCounts
from kvmesh.router.index import Depths, Holder

APPROXIMATE_TTL_S = 120.0
ON_ROUTE_TTL_S = 5.0
_HASH_BYTES = 8
_OVERHEAD_BLOCKS = 8  # what a prediction takes besides its blocks


class _Prediction(Struct):
    hashes: bytes
    ends_s: float


_Key = tuple[RequestId, Holder]


class PredictedPrefixes:
    """Prefixes that holders will have, of at most `max_blocks` in all. Blocks that requests share count for each.

    Over a limit, the oldest prediction goes first, and of it the deepest blocks. A prefix that is sent again stays
    until the last request with it has expired.
    """

    def __init__(self, ttl_s: float = ON_ROUTE_TTL_S, max_blocks: int = 2_000_000) -> None:
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._chains = ChainCounts()
        self._predictions: OrderedDict[_Key, _Prediction] = OrderedDict()  # by time, and so by end
        self._of_holder: dict[Holder, OrderedDict[RequestId, None]] = {}  # by time
        self._of_request: dict[RequestId, set[Holder]] = {}
        self._counted_blocks = 0

    def __len__(self) -> int:
        """Return the number of predictions: one for each request and holder."""
        return len(self._predictions)

    def placed(
        self, request_id: RequestId, holder: Holder, hashes: bytes, now: float, pool_blocks: int | None = None
    ) -> None:
        """Predict that `holder` will have this prompt. Two holders may: where it prefills, and where it decodes.

        hashes: the prompt's sequence hashes, packed u64 [n]. `pool_blocks`: the holder's whole pool, if it is known.
        """
        self._expire(now)
        self._drop((request_id, holder))
        if not hashes:
            return
        self._chains.add(holder, hashes)
        self._predictions[request_id, holder] = _Prediction(hashes, now + self._ttl_s)
        self._of_holder.setdefault(holder, OrderedDict())[request_id] = None
        self._of_request.setdefault(request_id, set()).add(holder)
        self._counted_blocks += _counted(hashes)
        while self._counted_blocks > self._max_blocks:
            self._drop(next(iter(self._predictions)))
        if pool_blocks is not None:
            self._trim(holder, pool_blocks)

    def match(self, hashes: bytes, now: float) -> dict[Holder, int]:
        """Return how many leading blocks of `hashes` (packed u64 [n]) are predicted for each holder, if any."""
        self._expire(now)
        return self._chains.match(hashes)

    def forget(self, request_id: RequestId) -> None:
        """Forget the predictions of a request that failed. Unknown requests are no error."""
        for holder in list(self._of_request.get(request_id, ())):
            self._drop((request_id, holder))

    def forget_holder(self, holder: Holder) -> None:
        """Forget the predictions for one holder."""
        for request_id in list(self._of_holder.get(holder, ())):
            self._drop((request_id, holder))

    def forget_worker(self, worker_id: WorkerId) -> None:
        for holder in [holder for holder in self._of_holder if holder.worker_id == worker_id]:
            self.forget_holder(holder)

    def _expire(self, now: float) -> None:
        while self._predictions and next(iter(self._predictions.values())).ends_s <= now:
            self._drop(next(iter(self._predictions)))

    def _trim(self, holder: Holder, pool_blocks: int) -> None:
        while (excess := self._chains.blocks_of(holder) - pool_blocks) > 0:
            key = (next(iter(self._of_holder[holder])), holder)
            kept = self._without_deepest(holder, self._predictions[key].hashes, excess)
            self._drop(key) if kept is None else self._shorten(key, kept)

    def _without_deepest(self, holder: Holder, hashes: bytes, excess: int) -> bytes | None:
        """Return a chain without its deepest `excess` blocks; None if no other chain shares the remaining ones."""
        before = self._chains.blocks_of(holder)
        self._chains.discard(holder, hashes)
        alone = before - self._chains.blocks_of(holder)
        self._chains.add(holder, hashes)
        return hashes[: -excess * _HASH_BYTES] if alone > excess else None

    def _shorten(self, key: _Key, kept: bytes) -> None:
        prediction = self._predictions[key]
        self._chains.discard(key[1], prediction.hashes)
        self._chains.add(key[1], kept)
        self._counted_blocks += _counted(kept) - _counted(prediction.hashes)
        prediction.hashes = kept

    def _drop(self, key: _Key) -> None:
        if (prediction := self._predictions.pop(key, None)) is None:
            return
        request_id, holder = key
        self._chains.discard(holder, prediction.hashes)
        self._counted_blocks -= _counted(prediction.hashes)
        del self._of_holder[holder][request_id]
        if not self._of_holder[holder]:
            del self._of_holder[holder]
        self._of_request[request_id].discard(holder)
        if not self._of_request[request_id]:
            del self._of_request[request_id]


def _counted(hashes: bytes) -> int:
    return len(hashes) // _HASH_BYTES + _OVERHEAD_BLOCKS


class CachePredictions:
    """The predictions for all workers: short ones beside KV events, long ones for workers without them."""

    def __init__(self, ttl_s: float = ON_ROUTE_TTL_S, approximate_ttl_s: float = APPROXIMATE_TTL_S) -> None:
        """Either time may be 0: then nothing of that kind is predicted."""
        self.follows_in_flight = ttl_s > 0
        self._approximates = approximate_ttl_s > 0
        self._on_route = PredictedPrefixes(ttl_s=ttl_s)
        self._approximate = PredictedPrefixes(ttl_s=approximate_ttl_s)

    def placed(self, request_id: RequestId, holder: Holder, card: WorkerCard, hashes: bytes, now: float) -> None:
        """Note a placement: a worker without KV events will hold the prompt."""
        if not card.kv_events and self._approximates:
            self._approximate.placed(request_id, holder, hashes, now, card.total_blocks)

    def computed(self, request_id: RequestId, holder: Holder, card: WorkerCard, hashes: bytes, now: float) -> None:
        """Note a computed prompt: the worker's KV events will soon report it."""
        if card.kv_events and self.follows_in_flight:
            self._on_route.placed(request_id, holder, hashes, now, card.total_blocks)

    def deepen(self, found: dict[Holder, Depths], hashes: bytes, now: float) -> None:
        """Add what is predicted of a prompt to what is known of it."""
        if len(self._on_route):
            deepen(found, self._on_route.match(hashes, now))
        if len(self._approximate):
            deepen(found, self._approximate.match(hashes, now))

    def failed(self, request_id: RequestId) -> None:
        """Forget what a request was to leave behind."""
        self._on_route.forget(request_id)
        self._approximate.forget(request_id)

    def reported(self, holder: Holder) -> None:
        """Forget what was predicted for a holder whose KV events have come."""
        self._on_route.forget_holder(holder)

    def forget_worker(self, worker_id: WorkerId) -> None:
        self._on_route.forget_worker(worker_id)
        self._approximate.forget_worker(worker_id)


def deepen(found: dict[Holder, Depths], predicted: Mapping[Holder, int]) -> None:
    """Count the blocks that will be on a device as if they were there."""
    for holder, depth in predicted.items():
        known = found.get(holder)
        if known is None or known[0] < depth:
            found[holder] = (depth, depth, depth, depth) if known is None else tuple(max(d, depth) for d in known)  # type: ignore[assignment]
