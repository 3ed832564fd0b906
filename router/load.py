"""Track the requests in flight on each holder. Every placement is a booking: a lease that ends with its request.

A booking ends with `free`, with its worker, or `lease_s` after the last sign of life of its request. Other routers
report sums per holder, and each sum replaces the last one of that router. So the next report makes a lost one good.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from kvmesh.protocol.ids import RequestId
from kvmesh.router.chains import ChainCounts
from kvmesh.router.index import Holder
from kvmesh.router.pressure import BusyShare

LEASE_S = 120.0
PROMPTS_WINDOW_S = 10.0  # about as long as short answers take
SPEED_MEMORY = 0.9  # the weight of a prompt in the worker's speed falls to this share with each later one
SPEED_DOUBT = 0.2  # a worker may be slower than its last prompts by this share without being reported as slow


class Share(NamedTuple):
    """Load that one router has placed on one holder."""

    queued_tokens: float = 0  # still to prefill
    held_blocks: int = 0
    requests: int = 0


NOTHING = Share()
UNBOOKED = ""  # stands among the names of routers for load that workers report and no router has booked


@dataclass(slots=True)
class RecentMost:
    """The largest value since the mark before the last one."""

    before: float = 0.0  # between the last two marks
    since: float = 0.0

    @property
    def value(self) -> float:
        return max(self.before, self.since)

    def note(self, value: float) -> None:
        if value > self.since:
            self.since = value

    def mark(self, value: float) -> None:
        """Set a mark; `value` is the present one."""
        self.before, self.since = self.since, value


@dataclass(slots=True)
class HolderLoad:
    """The requests on one holder that have not ended. The first four numbers count this router's own."""

    busy: BusyShare = field(default_factory=BusyShare)  # of its pool: how long holders have had prompts to compute
    queued_tokens: int = 0
    private_blocks: int = 0  # not shared: blocks of answers, and partly filled ones
    requests: int = 0  # that decode there
    own: Share = NOTHING  # these three, with the blocks of prompts
    elsewhere: dict[str, Share] = field(default_factory=dict)  # the shares of other routers, by router
    with_prompts: BusyShare = field(default_factory=lambda: BusyShare(PROMPTS_WINDOW_S))  # the same, of this holder
    is_busy: bool = False  # as these two count it
    total: Share = NOTHING  # of all routers
    prefilling: dict[RequestId, int] = field(default_factory=dict)  # tokens of each, in the order of placement
    computes_since_s: float = 0.0  # when the first of these was placed, or when the one before it was done
    computed_tokens: float = 0.0  # by the last prompts
    computed_s: float = 0.0  # the time that they took
    speed: float = 0.0  # tokens/s of these; 0: not known
    most_backlog: RecentMost | None = None  # of `backlog`, where the worker reports what it has to compute

    def done_tokens(self, now: float) -> float:
        """Estimate how much of the first of `prefilling` is computed by now, by the worker's speed so far."""
        done, all_of_it = (now - self.computes_since_s) * self.speed, next(iter(self.prefilling.values()), 0)
        return done if done < all_of_it else all_of_it

    @property
    def unbooked(self) -> Share:
        """The part of `total` that the worker has reported and no router has booked."""
        return self.elsewhere.get(UNBOOKED, NOTHING)

    def explain_unbooked(self, tokens: float) -> None:
        """Take tokens off the unbooked load that turned out to be booked, or done."""
        share = self.elsewhere.get(UNBOOKED)
        if share is not None:
            self.elsewhere[UNBOOKED] = share._replace(queued_tokens=max(0, share.queued_tokens - tokens))

    def backlog(self, now: float) -> float:
        """Return how many of the booked prompt tokens are still to compute, at most."""
        queued = self.total.queued_tokens - self.unbooked.queued_tokens
        return queued - (1 - SPEED_DOUBT) * self.done_tokens(now) if self.prefilling else queued


class Owner(NamedTuple):
    """The tenant that is charged for the answer of a request in flight, and the priority of the request."""

    tenant: str = ""
    priority: int = 0


class ChangedHolders(set[Holder]):
    """The holders whose load has changed since they were taken last. Each such set has one reader."""

    def take(self) -> list[Holder]:
        """Return the holders that have changed since the last call."""
        taken = list(self)
        self.clear()
        return taken


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
    """Knows holders between `join` and `leave`. Load can be booked only on known holders."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._loads: dict[Holder, HolderLoad] = {}
        self._bookings: OrderedDict[RequestId, _Booking] = OrderedDict()  # by end
        self._of_holder: dict[Holder, set[RequestId]] = {}
        self._own_changes = ChangedHolders()  # of this router's own load: for the other routers
        self.changes = ChangedHolders()  # of the total load: for the shelves (router/fleet.py)
        self.chains = ChainCounts()  # prompts of requests in flight, where they decode
        self.prefilling = ChainCounts()  # the same prompts where another worker prefills them, until it has

    def __len__(self) -> int:
        return len(self._bookings)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._bookings

    def join(self, holder: Holder, busy: BusyShare | None = None) -> HolderLoad:
        """Return the load of the holder, for reading; it counts from now on. `busy` is the account of its pool."""
        if holder not in self._loads:
            self._loads[holder] = HolderLoad(busy or BusyShare())
            self._of_holder[holder] = set()
        return self._loads[holder]

    def leave(self, holder: Holder, now: float) -> None:
        """End all bookings of a holder that is gone. An unknown holder is no error."""
        for request_id in list(self._of_holder.get(holder, ())):
            self.free(request_id, now)
        load = self._loads.pop(holder, None)
        if load is not None and load.is_busy:  # with what other routers have placed there
            load.busy.change(-1, now)
        self._of_holder.pop(holder, None)
        self._own_changes.discard(holder)
        self.changes.discard(holder)
        self.chains.drop(holder)
        self.prefilling.drop(holder)

    def of(self, holder: Holder) -> HolderLoad:
        return self._loads[holder]

    def knows(self, holder: Holder) -> bool:
        return holder in self._loads

    def shares(self) -> dict[Holder, Share]:
        """Return what this router has placed on each holder, without the holders that have nothing of it."""
        return {holder: load.own for holder, load in self._loads.items() if load.own != NOTHING}

    def take_own_changes(self) -> dict[Holder, Share]:
        """Return the shares of this router that have changed since the last call; NOTHING where nothing remains."""
        return {holder: self._loads[holder].own for holder in self._own_changes.take()}

    def set_elsewhere(self, router: str, shares: Mapping[Holder, Share], now: float) -> None:
        """Replace all that another router has placed; an empty mapping when it has left."""
        gone = {holder: NOTHING for holder, load in self._loads.items() if router in load.elsewhere}
        self.update_elsewhere(router, gone | dict(shares), now)

    def update_elsewhere(self, router: str, shares: Mapping[Holder, Share], now: float) -> None:
        """Replace what another router has placed on some holders. Shares of unknown holders are dropped."""
        for holder, share in shares.items():
            load = self._loads.get(holder)
            if load is None or (before := load.elsewhere.get(router, NOTHING)) == share:
                continue
            load.elsewhere[router] = share
            if share == NOTHING:
                del load.elsewhere[router]
            if router != UNBOOKED and share.queued_tokens > before.queued_tokens:
                load.explain_unbooked(share.queued_tokens - before.queued_tokens)  # the worker's report came first
            load.total = _sum([load.own, *load.elsewhere.values()])
            self.changes.add(holder)
            self._count_busy(load, now)
            if load.most_backlog is not None:
                load.most_backlog.note(load.backlog(now))

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
    ) -> None:
        """Book a request. `prefill` computes `prefill_tokens`; it is `decode` where one worker does both halves.

        A booking of the same name ends. hashes: the prompt's sequence hashes, packed u64 [n].
        """
        self.free(request_id, now)
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
        self._begin_prefill(request_id, booking, now)

    def prefill_done(self, request_id: RequestId, now: float) -> None:
        """Count the prompt as computed: the first token is there. Unknown requests and second calls are no error."""
        booking = self._bookings.get(request_id)
        if booking is not None and booking.is_prefilling:
            self._renew(request_id, booking, now)
            self._learn(request_id, booking, now)
            self._end_prefill(request_id, booking, now)

    def progress(self, request_id: RequestId, answer_blocks: int, now: float) -> int:
        """Renew a booking whose answer takes `answer_blocks` by now. Return how many more these are than before.

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

    def free(self, request_id: RequestId, now: float) -> None:
        """End a booking. A second call does nothing."""
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return
        self._of_holder[booking.decode].discard(request_id)
        load = self._loads[booking.decode]
        load.requests -= 1
        load.private_blocks -= booking.answer_blocks
        self.chains.discard(booking.decode, booking.hashes)
        self._sum_up(booking.decode)
        if booking.is_prefilling:
            self._end_prefill(request_id, booking, now)

    def expired(self, now: float) -> list[RequestId]:
        """Return the requests that have shown no sign of life for `lease_s`. The caller frees them."""
        found: list[RequestId] = []
        for request_id, booking in self._bookings.items():
            if booking.ends_s > now:
                break
            found.append(request_id)
        return found

    def holders_of(self, request_id: RequestId) -> Sequence[Holder]:
        """Return where the request decodes and, until its first token, where another worker prefills it."""
        booking = self._bookings.get(request_id)
        if booking is None:
            return ()
        is_one = booking.decode == booking.prefill or not booking.is_prefilling
        return (booking.decode,) if is_one else (booking.decode, booking.prefill)

    def hashes_of(self, request_id: RequestId) -> bytes:
        """Return the hashes of a booking's prompt; none if there is no such booking."""
        booking = self._bookings.get(request_id)
        return b"" if booking is None else booking.hashes

    def owner_of(self, request_id: RequestId) -> Owner:
        """Return the owner of a booking. Raises KeyError if there is no such booking."""
        return self._bookings[request_id].owner

    def _renew(self, request_id: RequestId, booking: _Booking, now: float) -> None:
        booking.ends_s = now + self._lease_s
        self._bookings.move_to_end(request_id)

    def _begin_prefill(self, request_id: RequestId, booking: _Booking, now: float) -> None:
        load = self._loads[booking.prefill]
        if not load.prefilling:
            load.computes_since_s = now
        load.prefilling[request_id] = booking.prefill_tokens
        self._queue(booking.prefill, booking.prefill_tokens, now)
        most = load.most_backlog
        if most is not None and load.total.queued_tokens > most.since:  # otherwise the backlog is no new maximum
            most.note(load.backlog(now))

    def _learn(self, request_id: RequestId, booking: _Booking, now: float) -> None:
        """Update the worker's speed with the time that the first prompt in its queue took."""
        load = self._loads[booking.prefill]
        if next(iter(load.prefilling)) == request_id:
            load.computed_tokens = SPEED_MEMORY * load.computed_tokens + booking.prefill_tokens
            load.computed_s = SPEED_MEMORY * load.computed_s + (now - load.computes_since_s)
            load.speed = load.computed_tokens / load.computed_s if load.computed_s > 0 else 0.0

    def _end_prefill(self, request_id: RequestId, booking: _Booking, now: float) -> None:
        booking.is_prefilling = False
        load = self._loads[booking.prefill]
        if next(iter(load.prefilling)) == request_id:
            load.computes_since_s = max(load.computes_since_s, now)  # the next one's turn
        del load.prefilling[request_id]
        if booking.prefill != booking.decode:
            self._of_holder[booking.prefill].discard(request_id)
            self.prefilling.discard(booking.prefill, booking.hashes)
        if load.elsewhere:
            load.explain_unbooked(booking.prefill_tokens)  # what the worker had to compute beyond it is done too
        self._queue(booking.prefill, -booking.prefill_tokens, now)

    def _queue(self, holder: Holder, tokens: int, now: float) -> None:
        load = self._loads[holder]
        load.queued_tokens += tokens
        self._sum_up(holder)
        self._count_busy(load, now)

    def _count_busy(self, load: HolderLoad, now: float) -> None:
        is_busy = load.total.queued_tokens > 0
        if is_busy != load.is_busy:
            load.is_busy = is_busy
            change = 1 if is_busy else -1
            load.busy.change(change, now)
            load.with_prompts.change(change, now)

    def _sum_up(self, holder: Holder) -> None:
        """Add up the shares of a holder. It is done once per change, so that placements only have to read."""
        load = self._loads[holder]
        load.own = Share(load.queued_tokens, self.chains.blocks_of(holder) + load.private_blocks, load.requests)
        load.total = _sum([load.own, *load.elsewhere.values()]) if load.elsewhere else load.own
        self._own_changes.add(holder)
        self.changes.add(holder)


def _sum(shares: Sequence[Share]) -> Share:
    tokens: float = 0
    blocks = requests = 0
    for share in shares:
        tokens += share.queued_tokens
        blocks += share.held_blocks
        requests += share.requests
    return Share(tokens, blocks, requests)
