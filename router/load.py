"""What is in flight where. Every placement is a booking: a lease, freed when its request has ended however it ended.

A booking ends with `free`, with the worker it stands on, or `lease_s` after the last sign of its request's life. What
other routers have placed comes as sums per holder, each replacing the last of its router: a sum that was lost is made
good by the next, and nothing has to be freed twice.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from protocol.ids import RequestId
from router.chains import ChainCounts
from router.index import Holder

LEASE_S = 120.0
SPEED_MEMORY = 0.9  # what the speed of a worker's last prompts counts after one more


class Share(NamedTuple):
    """Load that one router has placed on one holder."""

    queued_tokens: float = 0  # still to prefill
    held_blocks: int = 0
    requests: int = 0


NOTHING = Share()


@dataclass(slots=True)
class HolderLoad:
    """What is placed on one holder and has not ended. The first three are this router's own."""

    queued_tokens: int = 0
    private_blocks: int = 0  # not shared: those of answers, and partly filled ones
    requests: int = 0  # that decode there
    own: Share = NOTHING  # the sum of that, with the blocks of prompts
    elsewhere: dict[str, Share] = field(default_factory=dict)  # by router
    is_busy: bool = False  # as the last Change has told
    total: Share = NOTHING  # of all routers
    prefilling: dict[RequestId, int] = field(default_factory=dict)  # tokens of each, in the order of placement
    computes_since_s: float = 0.0  # the first of these: when it was placed, or the one before it was done
    computed_tokens: float = 0.0  # and the time that took, of late
    computed_s: float = 0.0
    speed: float = 0.0  # tokens/s by these; 0: not known

    def done_tokens(self, now: float) -> float:
        """What must have been computed by now of the first of `prefilling`, by the worker's speed so far."""
        done, all_of_it = (now - self.computes_since_s) * self.speed, next(iter(self.prefilling.values()), 0)
        return done if done < all_of_it else all_of_it


class Owner(NamedTuple):
    """Who pays for the answer of a request in flight."""

    tenant: str = ""
    priority: int = 0


class Change(NamedTuple):
    """A holder that has begun, or ceased, to have prompts to compute."""

    holder: Holder
    is_busy: bool


class _Booking(Struct):
    decode: Holder
    prefill: Holder
    prefill_tokens: int
    hashes: bytes
    owner: Owner
    answer_blocks: int
    ends_s: float
    is_prefilling: bool = True


class ActiveLoad:
    """Knows holders between `join` and `leave`; load is booked on known ones alone."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._loads: dict[Holder, HolderLoad] = {}
        self._bookings: OrderedDict[RequestId, _Booking] = OrderedDict()  # by end
        self._of_holder: dict[Holder, set[RequestId]] = {}
        self._changed: set[Holder] = set()  # since the others were told
        self._told: set[Holder] = set()  # holders whose load elsewhere has changed
        self._moved: set[Holder] = set()  # holders whose load has changed, whoever placed it
        self.chains = ChainCounts()  # prompts of requests in flight, where they decode
        self.prefilling = ChainCounts()  # where another worker prefills them, until it has

    def __len__(self) -> int:
        return len(self._bookings)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._bookings

    def join(self, holder: Holder) -> HolderLoad:
        """What is placed there from now on, to be read alone."""
        if holder not in self._loads:
            self._loads[holder] = HolderLoad()
            self._of_holder[holder] = set()
        return self._loads[holder]

    def leave(self, holder: Holder, now: float) -> list[Change]:
        """The holder is gone: its bookings end. Unknown ones are no error."""
        ended = list(self._of_holder.get(holder, ()))
        changes = [change for request_id in ended for change in self.free(request_id, now)]
        load = self._loads.pop(holder, None)
        if load is not None and load.is_busy:  # by what other routers have placed there
            changes.append(Change(holder, False))
        self._of_holder.pop(holder, None)
        self._changed.discard(holder)
        self._told.discard(holder)
        self._moved.discard(holder)
        self.chains.drop(holder)
        self.prefilling.drop(holder)
        return changes

    def of(self, holder: Holder) -> HolderLoad:
        return self._loads[holder]

    def shares(self) -> dict[Holder, Share]:
        """What this router has placed, where it has placed anything: for the other routers."""
        return {holder: load.own for holder, load in self._loads.items() if load.own != NOTHING}

    def take_changed(self) -> dict[Holder, Share]:
        """The same where it has changed since the last call; NOTHING where nothing is left."""
        changed, self._changed = self._changed, set()
        return {holder: self._loads[holder].own for holder in changed}

    def set_elsewhere(self, router: str, shares: Mapping[Holder, Share]) -> None:
        """All that another router has placed; an empty mapping when it has left."""
        gone = {holder: NOTHING for holder, load in self._loads.items() if router in load.elsewhere}
        self.update_elsewhere(router, gone | dict(shares))

    def update_elsewhere(self, router: str, shares: Mapping[Holder, Share]) -> None:
        """What another router has placed on some holders. Of unknown holders nothing is kept."""
        for holder, share in shares.items():
            load = self._loads.get(holder)
            if load is None or load.elsewhere.get(router, NOTHING) == share:
                continue
            load.elsewhere[router] = share
            if share == NOTHING:
                del load.elsewhere[router]
            load.total = _sum([load.own, *load.elsewhere.values()])
            self._told.add(holder)
            self._moved.add(holder)

    def take_moved(self) -> Collection[Holder]:
        """Whose total has changed since the last call."""
        moved, self._moved = self._moved, set()
        return moved

    def take_told(self) -> list[Change]:
        """What `update_elsewhere` has changed since the last call."""
        if not self._told:
            return []
        told, self._told = self._told, set()
        return [change for holder in told if holder in self._loads for change in self._note_busy(holder)]

    def book(
        self,
        request_id: RequestId,
        *,
        decode: Holder,
        prefill: Holder,
        prefill_tokens: int,
        hashes: bytes,
        now: float,
        owner: Owner = Owner(),  # noqa: B008 - it cannot change
    ) -> list[Change]:
        """`prefill` computes `prefill_tokens` (it is `decode` where one worker does both halves).

        hashes: the prompt's sequence hashes, packed u64 [n].
        """
        changes = self.free(request_id, now)
        booking = _Booking(decode, prefill, prefill_tokens, hashes, owner, 1, now + self._lease_s)
        self._bookings[request_id] = booking
        self._of_holder[decode].add(request_id)
        load = self._loads[decode]
        load.requests += 1
        load.private_blocks += 1
        self.chains.add(decode, hashes)
        if prefill != decode:
            self._of_holder[prefill].add(request_id)
            self._sum_up(decode)
            self.prefilling.add(prefill, hashes)
        return changes + self._begin_prefill(request_id, booking, now)

    def prefill_done(self, request_id: RequestId, now: float) -> list[Change]:
        """The first token is there. Unknown requests and second calls are no error."""
        booking = self._bookings.get(request_id)
        if booking is None or not booking.is_prefilling:
            return []
        self._renew(request_id, booking, now)
        self._learn(request_id, booking, now)
        return self._end_prefill(request_id, booking, now)

    def progress(self, request_id: RequestId, answer_blocks: int, now: float) -> int:
        """The request lives, and its answer takes so many blocks by now; how many more than before.

        Unknown requests are no error.
        """
        if (booking := self._bookings.get(request_id)) is None:
            return 0
        grown = answer_blocks - booking.answer_blocks
        if grown:
            booking.answer_blocks = answer_blocks
            self._loads[booking.decode].private_blocks += grown
            self._sum_up(booking.decode)
        self._renew(request_id, booking, now)
        return grown

    def free(self, request_id: RequestId, now: float) -> list[Change]:
        """The request has ended. A second call does nothing."""
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return []
        self._of_holder[booking.decode].discard(request_id)
        load = self._loads[booking.decode]
        load.requests -= 1
        load.private_blocks -= booking.answer_blocks
        self.chains.discard(booking.decode, booking.hashes)
        self._sum_up(booking.decode)
        return self._end_prefill(request_id, booking, now) if booking.is_prefilling else []

    def expired(self, now: float) -> list[RequestId]:
        """Bookings of which nothing was heard for too long; the caller frees them."""
        found: list[RequestId] = []
        for request_id, booking in self._bookings.items():
            if booking.ends_s > now:
                break
            found.append(request_id)
        return found

    def holders_of(self, request_id: RequestId) -> Sequence[Holder]:
        """Where a booking stands: where it decodes, and until its first token where another worker prefills it."""
        booking = self._bookings.get(request_id)
        if booking is None:
            return ()
        is_one = booking.decode == booking.prefill or not booking.is_prefilling
        return (booking.decode,) if is_one else (booking.decode, booking.prefill)

    def hashes_of(self, request_id: RequestId) -> bytes:
        """Of the prompt of a booking; none if there is no such booking."""
        booking = self._bookings.get(request_id)
        return b"" if booking is None else booking.hashes

    def owner_of(self, request_id: RequestId) -> Owner:
        """Raises KeyError if there is no such booking."""
        return self._bookings[request_id].owner

    def _renew(self, request_id: RequestId, booking: _Booking, now: float) -> None:
        booking.ends_s = now + self._lease_s
        self._bookings.move_to_end(request_id)

    def _begin_prefill(self, request_id: RequestId, booking: _Booking, now: float) -> list[Change]:
        load = self._loads[booking.prefill]
        if not load.prefilling:
            load.computes_since_s = now
        load.prefilling[request_id] = booking.prefill_tokens
        return self._queue(booking.prefill, booking.prefill_tokens)

    def _learn(self, request_id: RequestId, booking: _Booking, now: float) -> None:
        """How fast the worker is, from the time that the first in its queue took."""
        load = self._loads[booking.prefill]
        if next(iter(load.prefilling)) == request_id:
            load.computed_tokens = SPEED_MEMORY * load.computed_tokens + booking.prefill_tokens
            load.computed_s = SPEED_MEMORY * load.computed_s + (now - load.computes_since_s)
            load.speed = load.computed_tokens / load.computed_s if load.computed_s > 0 else 0.0

    def _end_prefill(self, request_id: RequestId, booking: _Booking, now: float) -> list[Change]:
        booking.is_prefilling = False
        load = self._loads[booking.prefill]
        if next(iter(load.prefilling)) == request_id:
            load.computes_since_s = max(load.computes_since_s, now)  # the next one's turn
        del load.prefilling[request_id]
        if booking.prefill != booking.decode:
            self._of_holder[booking.prefill].discard(request_id)
            self.prefilling.discard(booking.prefill, booking.hashes)
        return self._queue(booking.prefill, -booking.prefill_tokens)

    def _queue(self, holder: Holder, tokens: int) -> list[Change]:
        self._loads[holder].queued_tokens += tokens
        self._sum_up(holder)
        return self._note_busy(holder)

    def _note_busy(self, holder: Holder) -> list[Change]:
        load = self._loads[holder]
        is_busy = load.total.queued_tokens > 0
        if is_busy == load.is_busy:
            return []
        load.is_busy = is_busy
        return [Change(holder, is_busy)]

    def _sum_up(self, holder: Holder) -> None:
        """Once for each change, so that placements only have to read."""
        load = self._loads[holder]
        load.own = Share(load.queued_tokens, self.chains.blocks_of(holder) + load.private_blocks, load.requests)
        load.total = _sum([load.own, *load.elsewhere.values()]) if load.elsewhere else load.own
        self._changed.add(holder)
        self._moved.add(holder)


def _sum(shares: Sequence[Share]) -> Share:
    tokens: float = 0
    blocks = requests = 0
    for share in shares:
        tokens += share.queued_tokens
        blocks += share.held_blocks
        requests += share.requests
    return Share(tokens, blocks, requests)
