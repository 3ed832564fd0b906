"""What a worker's cache will hold because a request was sent there. Pure; the time is a parameter.

Used twice. For workers that tell nothing of their cache it takes the place of the index: a prediction lives about as
long as an unused prefix in such a cache, and no holder is believed to have more blocks than its pool. Beside the index
it fills the gap until a request's own KV events arrive, so that requests with the same prefix that come in one burst
follow each other: there it lives for seconds.
"""

from collections import OrderedDict

from msgspec import Struct

from protocol.ids import RequestId, WorkerId
from router.chains import ChainCounts
from router.index import Holder

APPROXIMATE_TTL_S = 120.0
ON_ROUTE_TTL_S = 5.0
_HASH_BYTES = 8
_OVERHEAD_BLOCKS = 8  # what a prediction takes besides its blocks


class _Prediction(Struct):
    hashes: bytes
    ends_s: float


_Key = tuple[RequestId, Holder]


class PredictedPrefixes:
    """At most `max_blocks` over all holders, those that requests share counted for each of them: a bound on memory.

    What is over a limit goes oldest first, and of the oldest its deepest blocks first. A prefix that is sent again
    stays until the last request with it has expired.
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
        """Predictions: one for each request and holder."""
        return len(self._predictions)

    def placed(
        self, request_id: RequestId, holder: Holder, hashes: bytes, now: float, pool_blocks: int | None = None
    ) -> None:
        """`holder` will have this prompt; and so may others: where it prefills, and where it decodes.

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
        """For every holder of a predicted prefix of `hashes` (packed u64 [n]) its length in blocks, >= 1."""
        self._expire(now)
        return self._chains.match(hashes)

    def forget(self, request_id: RequestId) -> None:
        """The request failed: what it was to leave behind is not there. Unknown requests are no error."""
        for holder in list(self._of_request.get(request_id, ())):
            self._drop((request_id, holder))

    def forget_holder(self, holder: Holder) -> None:
        """What was predicted of it is known better now."""
        for request_id in list(self._of_holder.get(holder, ())):
            self._drop((request_id, holder))

    def forget_worker(self, worker_id: WorkerId) -> None:
        for holder in [holder for holder in self._of_holder if holder.worker_id == worker_id]:
            self.forget_holder(holder)

    def blocks_of(self, holder: Holder) -> int:
        """Distinct blocks that are predicted there; those that have expired since the last call count too."""
        return self._chains.blocks_of(holder)

    @property
    def num_blocks(self) -> int:
        """The same, over all holders."""
        return self._chains.num_blocks

    def _expire(self, now: float) -> None:
        while self._predictions and next(iter(self._predictions.values())).ends_s <= now:
            self._drop(next(iter(self._predictions)))

    def _trim(self, holder: Holder, pool_blocks: int) -> None:
        while (excess := self._chains.blocks_of(holder) - pool_blocks) > 0:
            key = (next(iter(self._of_holder[holder])), holder)
            kept = self._without_deepest(holder, self._predictions[key].hashes, excess)
            self._drop(key) if kept is None else self._shorten(key, kept)

    def _without_deepest(self, holder: Holder, hashes: bytes, excess: int) -> bytes | None:
        """What is left of a chain after its deepest `excess` blocks go; None if it has not more than these alone."""
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
