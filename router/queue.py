"""Order the requests that wait because every worker that could take them is full. Pure; the time is a parameter.

The next request has the highest priority. Within it comes the tenant that was served the fewest tokens (a virtual token
counter), and of that tenant the first request by the order of the rules. While the queue is not empty, every new
request goes through it: only the queue decides which request may overtake which. There is one queue per model, because
its requests compete for the same workers.

All is kept in sorted lists: a binary search, then a memmove of at most `max_requests` pointers, which is the smaller
part up to tens of thousands of them. So a cancelled request leaves at once, where a heap would keep its place.
"""

import math
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, Literal, TypeVar

from kvmesh.protocol.errors import InvalidRequestError, OverloadedError
from kvmesh.protocol.ids import RequestId

DRAIN_WINDOW_S = 10.0  # the drain rate is measured over about so long
LEAST_SERVED = 8  # requests by which the rate is known
MOST_OF_NONE = 3.0  # so many may well come in a time in which none came
MAX_SERVED = 1024  # of the last ones, whose times are remembered
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
MAX_ASKED = 32  # after so many requests that do not fit, the others wait too
IDLE_TENANTS = 256  # so many are remembered in each priority, those furthest ahead

Order = Literal["fcfs", "wspt"]
P = TypeVar("P")
T = TypeVar("T", bound=tuple[Any, ...])
_Place = tuple[float, int, RequestId]  # in a line: the rules' key, then who came first
_Turn = tuple[float, int, str]  # of a tenant: its counter, then who was served longest ago


@dataclass(frozen=True, slots=True)
class QueueRules:
    """The order and the bounds of a queue. A request takes max(1 / `max_requests`, isl / `max_tokens`) of it.

    wspt (weighted shortest prefill time) serves a request as if it had come uncached / `aging_tokens_per_s` later than
    it did. So short prompts go first. A prompt of u uncached tokens is overtaken only by requests of its tenant and
    priority that come within u / `aging_tokens_per_s` seconds after it.
    """

    order: Order = "fcfs"
    max_requests: int = 1024  # >= 1
    max_tokens: int = 8_000_000  # >= 1, of prompts that wait
    aging_tokens_per_s: float = 8192.0  # > 0; smaller: short prompts wait less, long ones more
    output_weight: float = 2.0  # what a token of an answer counts for fairness; a prompt's uncached token counts 1


@dataclass(frozen=True, slots=True)
class Pending(Generic[P]):
    """A request that waits. Times are those of the router's clock."""

    request_id: RequestId
    tenant: str
    priority: int  # strict: the higher goes first. From a small range
    arrived_s: float  # at its first try, so that a retry keeps its place
    deadline_s: float
    isl_tokens: int
    uncached_tokens: int  # of the prompt, as estimated when it came
    payload: P  # of the router


class PendingQueue(Generic[P]):
    """A queue that the rules bound. When it is empty, it remembers no tenant."""

    def __init__(self, rules: QueueRules | None = None) -> None:
        self._rules = rules or QueueRules()
        self._waiting: dict[RequestId, _Waiting[P]] = {}
        self._classes: dict[int, _Class] = {}
        self._deadlines: list[_Place] = []
        self._drain = _Drain()
        self._ticks = count()
        self._held = 0
        self.isl_tokens = 0
        self.since_s = 0.0  # when it was empty last

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, item: Pending[P], now: float) -> Sequence[Pending[P]]:
        """Let a request wait. Return the requests that it displaced: fail them with `refusal`.

        A full queue makes room at the cost of lower priorities, the lowest first. Next comes a tenant that holds more
        of the queue in this priority than the newcomer's would. Of the tenant that holds most, the request that would
        be served last leaves. Raises OverloadedError if that gives no room, InvalidRequestError if the request waits
        already.
        """
        if item.request_id in self._waiting:
            raise InvalidRequestError(f"request {item.request_id} waits in the queue already")
        if not self._waiting:
            self._drain.begin(now)
            self.since_s = now
        displaced = self._make_room(item, now)
        tick = next(self._ticks)
        waiting = _Waiting(item, (self._key(item), tick, item.request_id), self._room(item))
        self._waiting[item.request_id] = waiting
        insort(self._deadlines, waiting.deadline)
        self._classes.setdefault(item.priority, _Class(self._ticks)).add(item, waiting.place, waiting.room)
        self._count(waiting, +1)
        return displaced

    def pop_next(self, now: float, fits: Callable[[Pending[P]], bool]) -> Pending[P] | None:
        """Take out the next request that fits somewhere now, or None. Its prompt is charged to its tenant.

        A request that does not fit, or waits for the worker that has its prefix, does not hold up the others: `fits` is
        asked in order until it returns True, at most MAX_ASKED times. The first requests of all tenants are asked
        before any second one. Requests past their deadline are passed over.
        """
        asked = 0
        for priority in sorted(self._classes, reverse=True):
            for request_id in self._classes[priority].in_order():
                item = self._waiting[request_id].item
                if item.deadline_s <= now:
                    continue
                if fits(item):
                    self._classes[priority].serve(item.tenant, max(1, item.uncached_tokens))
                    self._drain.served(now)
                    return self._take(request_id)
                asked += 1
                if asked == MAX_ASKED:
                    return None
        return None

    def expire(self, now: float) -> Sequence[Pending[P]]:
        """Take out the requests whose deadline has passed."""
        expired: list[Pending[P]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            expired.append(self._take(self._deadlines[0][2]))
        return expired

    def next_deadline(self) -> float | None:
        """Return when to call `expire` next, or None."""
        return self._deadlines[0][0] if self._deadlines else None

    def cancel(self, request_id: RequestId) -> Pending[P] | None:
        """Take a request out. Unknown requests are no error."""
        return self._take(request_id) if request_id in self._waiting else None

    def charge(self, tenant: str, output_tokens: int, priority: int = 0) -> None:
        """Charge a tenant for so many tokens of an answer."""
        if priority in self._classes and output_tokens > 0:
            self._classes[priority].charge(tenant, output_tokens * self._rules.output_weight)

    def wait_s(self, item: Pending[P], now: float, gap_s: float = 0.0) -> float:
        """Return for how long a newcomer would wait, at the recent rate.

        `gap_s`: what is known otherwise of the time between two requests that are served. It counts as much as
        LEAST_SERVED requests. Without it the highest of the likely rates counts.
        """
        requests = self._ahead_of(item) + 1
        return self._drain.mean_time_for(requests, now, gap_s) if gap_s else self._drain.least_time_for(requests, now)

    def take_hopeless(self, now: float, needs_s: Callable[[Pending[P]], float]) -> Sequence[Pending[P]]:
        """Take out the requests whose turn will come too late: `needs_s` has to be left before their deadline then."""
        waits_s = self._drain.least_time_for(1, now)
        served, hopeless = 0, list[RequestId]()
        for priority in sorted(self._classes, reverse=True):
            for request_id in self._classes[priority].in_order():
                item = self._waiting[request_id].item
                if now + (served + 1) * waits_s + needs_s(item) > item.deadline_s:
                    hopeless.append(request_id)
                else:
                    served += 1
        return [self._take(request_id) for request_id in hopeless]

    def _ahead_of(self, item: Pending[P]) -> int:
        """Return about how many waiting requests will be served before a newcomer: tenants take turns."""
        above = sum([of_class.count for priority, of_class in self._classes.items() if priority > item.priority])
        mine = self._classes.get(item.priority)
        return above + (0 if mine is None else mine.ahead_of(item.tenant, self._key(item)))

    def retry_after_s(self, now: float) -> float:
        """Return in how many seconds the waiting requests will be served, at the recent rate; from 1 to 60."""
        return min(max(self._drain.time_for(len(self), now), MIN_RETRY_S), MAX_RETRY_S)

    def refusal(self, now: float) -> OverloadedError:
        """Return the error for a request that may not wait, or no longer."""
        what = f"{len(self)} requests with {self.isl_tokens} prompt tokens wait for a worker already"
        return OverloadedError(what, retry_after_s=self.retry_after_s(now))

    def _make_room(self, item: Pending[P], now: float) -> list[Pending[P]]:
        rules = self._rules
        capacity, room = rules.max_requests * rules.max_tokens, self._room(item)
        needed = self._held + room - capacity
        below = sum(other.held for priority, other in self._classes.items() if priority < item.priority)
        mine = self._classes.get(item.priority)
        if needed > below and (mine is None or not mine.has_fatter(item.tenant, room)):
            raise self.refusal(now)
        displaced: list[Pending[P]] = []
        while self._held + room > capacity:
            displaced.append(self._take(self._classes[min(self._classes)].last_of_fattest()))
        return displaced

    def _take(self, request_id: RequestId) -> Pending[P]:
        waiting = self._waiting.pop(request_id)
        item = waiting.item
        _discard(self._deadlines, waiting.deadline)
        self._classes[item.priority].remove(item, waiting.place, waiting.room)
        if not self._classes[item.priority].turns:
            del self._classes[item.priority]
        self._count(waiting, -1)
        return item

    def _count(self, waiting: "_Waiting[P]", sign: int) -> None:
        self._held += sign * waiting.room
        self.isl_tokens += sign * waiting.item.isl_tokens

    def _key(self, item: Pending[P]) -> float:
        aged = item.uncached_tokens / self._rules.aging_tokens_per_s if self._rules.order == "wspt" else 0.0
        return item.arrived_s + aged

    def _room(self, item: Pending[P]) -> int:
        """Return the share of an item of max_requests * max_tokens, as a whole number, so that sums stay exact."""
        return max(item.isl_tokens * self._rules.max_requests, self._rules.max_tokens)


@dataclass(slots=True)
class _Waiting(Generic[P]):
    item: Pending[P]
    place: _Place
    room: int

    @property
    def deadline(self) -> _Place:
        return (self.item.deadline_s, self.place[1], self.item.request_id)


@dataclass(slots=True)
class _Tenant:
    turn: _Turn
    line: list[_Place] = field(default_factory=list)
    held: int = 0


class _Class:
    """The requests of one priority. Tenants take turns: the tenant that was served the fewest tokens is next.

    A tenant that comes, or comes back, starts no lower than the least counter of the waiting tenants, nor than the
    counter served last (`_reached`). So neither idle time nor an unused turn is saved up. A tenant without requests is
    remembered while its counter is ahead of that: leaving for a moment must not reset it.
    """

    def __init__(self, ticks: Iterator[int]) -> None:
        self.turns: list[_Turn] = []  # of the tenants with a line
        self.held = 0
        self.count = 0
        self._ticks = ticks
        self._tenants: dict[str, _Tenant] = {}
        self._idle: list[_Turn] = []
        self._holdings: list[tuple[int, str]] = []
        self._reached = 0.0

    def add(self, item: Pending[P], place: _Place, room: int) -> None:
        tenant = self._join(item.tenant)
        if not tenant.line:
            insort(self.turns, tenant.turn)
        insort(tenant.line, place)
        self.count += 1
        self._hold(item.tenant, room)

    def remove(self, item: Pending[P], place: _Place, room: int) -> None:
        tenant = self._tenants[item.tenant]
        _discard(tenant.line, place)
        self.count -= 1
        self._hold(item.tenant, -room)
        if not tenant.line:
            _discard(self.turns, tenant.turn)
            insort(self._idle, tenant.turn)
        self._forget_idle()

    def in_order(self) -> Iterator[RequestId]:
        """Yield the first request of every tenant, by turn, then the second of each, ... Ends with any change."""
        lines = [self._tenants[turn[2]].line for turn in self.turns]
        depth = 0
        while lines:
            for line in lines:
                yield line[depth][2]
            depth += 1
            lines = [line for line in lines if len(line) > depth]

    def ahead_of(self, name: str, key: float) -> int:
        """Return how many requests are served before one of a tenant with this key, if tenants take equal turns."""
        mine = self._tenants.get(name)
        before = 0 if mine is None else bisect_left(mine.line, (key, sys.maxsize, RequestId("")))
        others = [self._tenants[turn[2]].line for turn in self.turns if turn[2] != name]
        return before + sum([min(len(line), before + 1) for line in others])

    def serve(self, name: str, tokens: float) -> None:
        tenant = self._tenants[name]
        self._reached = max(self._reached, tenant.turn[0])
        self._advance(tenant, self._reached + tokens)

    def charge(self, name: str, tokens: float) -> None:
        if name not in self._tenants:
            self._tenants[name] = _Tenant((self._floor(), next(self._ticks), name))
            insort(self._idle, self._tenants[name].turn)
        tenant = self._tenants[name]
        self._advance(tenant, tenant.turn[0] + tokens)
        self._forget_idle()

    def has_fatter(self, name: str, room: int) -> bool:
        """Return whether a tenant holds more than `name` would with `room` added."""
        held = self._tenants[name].held if name in self._tenants else 0
        return self._holdings[-1][0] > held + room

    def last_of_fattest(self) -> RequestId:
        return self._tenants[self._holdings[-1][1]].line[-1][2]

    def _join(self, name: str) -> _Tenant:
        """Return a tenant that has, or is about to have, requests here."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant((self._floor(), next(self._ticks), name))
        elif not tenant.line:  # it is ahead of the floor, or it would have been forgotten
            _discard(self._idle, tenant.turn)
        return tenant

    def _advance(self, tenant: _Tenant, counter: float) -> None:
        turns = self.turns if tenant.line else self._idle
        _discard(turns, tenant.turn)
        tenant.turn = (counter, next(self._ticks), tenant.turn[2])
        insort(turns, tenant.turn)

    def _floor(self) -> float:
        return max(self._reached, self.turns[0][0] if self.turns else 0.0)

    def _forget_idle(self) -> None:
        floor = self._floor()
        while self._idle and (self._idle[0][0] <= floor or len(self._idle) > IDLE_TENANTS):
            del self._tenants[self._idle.pop(0)[2]]

    def _hold(self, name: str, room: int) -> None:
        tenant = self._tenants[name]
        if tenant.held:
            _discard(self._holdings, (tenant.held, name))
        tenant.held += room
        self.held += room
        if tenant.held:
            insort(self._holdings, (tenant.held, name))


class _Drain:
    """Measures how fast the queue empties, over about the last DRAIN_WINDOW_S."""

    def __init__(self) -> None:
        self._requests = 0.0
        self._seconds = 0.0
        self._at = 0.0
        self._began = 0.0
        self._times: deque[float] = deque(maxlen=MAX_SERVED)  # when requests were served, since the queue has begun

    def begin(self, now: float) -> None:
        self._requests, self._seconds, self._at = 0.0, 0.0, now
        self._times.clear()
        self._began = now

    def served(self, now: float) -> None:
        requests, self._seconds = self._aged(now)
        self._requests, self._at = requests + 1, now
        self._times.append(now)

    def time_for(self, requests: int, now: float) -> float:
        """Return the time to serve so many requests. It grows while none is served, as if one had been."""
        served, seconds = self._aged(now)
        return requests * seconds / max(served, 1.0)

    def mean_time_for(self, requests: int, now: float, gap_s: float) -> float:
        """Return the time to serve so many requests, if it takes `gap_s` for each as far as the queue is too young."""
        self._trim(now)
        is_young = now - self._began < DRAIN_WINDOW_S or not self._times
        served = len(self._times) if is_young else len(self._times) - 1
        elapsed_s = now - (self._began if is_young else self._times[0])
        return requests * (LEAST_SERVED * gap_s + elapsed_s) / (LEAST_SERVED + served)

    def least_time_for(self, requests: int, now: float) -> float:
        """Return the time to serve so many requests if the rate is as high as it may well be, by the last ones served.

        While fewer than LEAST_SERVED were served, little is known: then only the requests after so many count.
        """
        self._trim(now)
        served = len(self._times)
        if served < LEAST_SERVED:
            return max(0, requests - LEAST_SERVED) * (now - self._began) / (served + math.sqrt(served) + MOST_OF_NONE)
        return requests * (now - self._times[0]) / (served + math.sqrt(served))

    def _trim(self, now: float) -> None:
        while len(self._times) > LEAST_SERVED and self._times[0] < now - DRAIN_WINDOW_S:
            self._times.popleft()

    def _aged(self, now: float) -> tuple[float, float]:
        kept = math.exp((self._at - now) / DRAIN_WINDOW_S)
        return self._requests * kept, self._seconds * kept + DRAIN_WINDOW_S * (1 - kept)


def _discard(ordered: list[T], item: T) -> None:
    del ordered[bisect_left(ordered, item)]
