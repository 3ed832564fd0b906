"""What is in flight where: every placement is a booking, freed when its request has ended however it ended."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.ids import RequestId, SequenceHash
from router.index import Holder


@dataclass(slots=True)
class HolderLoad:
    """Counts of what was placed on one holder and has not ended. Of an answer only its first block is counted,
    not how it grows."""

    prefill_tokens: int = 0  # still to compute
    requests: int = 0
    shared_blocks: Counter[SequenceHash] = field(default_factory=Counter)  # prompt blocks, once each
    private_blocks: int = 0  # partly filled ones

    @property
    def decode_blocks(self) -> int:
        return len(self.shared_blocks) + self.private_blocks

    def new_blocks(self, hashes: Sequence[SequenceHash]) -> int:
        """How many of a prompt's full blocks no running request holds yet."""
        if not self.shared_blocks:
            return len(hashes)
        return sum(1 for name in hashes if name not in self.shared_blocks)


@dataclass(frozen=True, slots=True)
class _Booking:
    decode: Holder
    prefill: Holder
    prefill_tokens: int
    hashes: tuple[SequenceHash, ...]


class ActiveLoad:
    def __init__(self) -> None:
        self._loads: dict[Holder, HolderLoad] = {}
        self._bookings: dict[RequestId, _Booking] = {}
        self._prefilling: set[RequestId] = set()

    def __len__(self) -> int:
        return len(self._bookings)

    def of(self, holder: Holder) -> HolderLoad:
        return self._loads.get(holder) or HolderLoad()

    def book(
        self,
        request_id: RequestId,
        *,
        decode: Holder,
        prefill: Holder,
        prefill_tokens: int,
        hashes: Sequence[SequenceHash],
    ) -> None:
        """`prefill` computes `prefill_tokens` (it is `decode` where one worker does both halves)."""
        self.free(request_id)
        self._bookings[request_id] = _Booking(decode, prefill, prefill_tokens, tuple(hashes))
        self._prefilling.add(request_id)
        self._load(prefill).prefill_tokens += prefill_tokens
        load = self._load(decode)
        load.requests += 1
        load.private_blocks += 1
        load.shared_blocks.update(hashes)

    def prefill_done(self, request_id: RequestId) -> None:
        """The first token is there. Unknown requests and second calls are no error."""
        if request_id in self._prefilling:
            self._prefilling.discard(request_id)
            booking = self._bookings[request_id]
            self._load(booking.prefill).prefill_tokens -= booking.prefill_tokens
            self._tidy(booking.prefill)

    def free(self, request_id: RequestId) -> None:
        """The request has ended. A second call does nothing."""
        if request_id not in self._bookings:
            return
        self.prefill_done(request_id)
        booking = self._bookings.pop(request_id)
        load = self._load(booking.decode)
        load.requests -= 1
        load.private_blocks -= 1
        load.shared_blocks.subtract(booking.hashes)
        for name in booking.hashes:
            if load.shared_blocks[name] <= 0:
                del load.shared_blocks[name]
        self._tidy(booking.decode)

    def _load(self, holder: Holder) -> HolderLoad:
        return self._loads.setdefault(holder, HolderLoad())

    def _tidy(self, holder: Holder) -> None:
        """A holder without load is not remembered: workers come and go."""
        load = self._loads[holder]
        if not (load.prefill_tokens or load.requests):
            del self._loads[holder]
