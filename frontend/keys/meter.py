"""Hold the requests of one key to its limits, wherever the budget of the key is."""

import asyncio
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvmesh.frontend.keys import metrics
from kvmesh.frontend.keys.budget import Budget, KeyLimits, Left, LimitName, OverLimit, left_of
from kvmesh.frontend.keys.lease import BudgetLease, LeasePart
from kvmesh.frontend.keys.owned import Recalled
from kvmesh.frontend.keys.sharing import LimitSharing
from kvmesh.frontend.keys.usage import Usage
from kvmesh.frontend.keys.window import slot_of
from kvmesh.protocol.errors import MeshError

FIRST_GUESS_TOKENS = 256
WEIGHT = 0.1  # of the latest answer in the mean


class Estimate:
    """Track the mean length of a key's latest answers."""

    __slots__ = ("_mean",)

    def __init__(self) -> None:
        self._mean = float(FIRST_GUESS_TOKENS)

    def note(self, answer_tokens: int) -> None:
        self._mean += WEIGHT * (answer_tokens - self._mean)

    @property
    def tokens(self) -> int:
        return max(1, round(self._mean))


def reserved_tokens(prompt_tokens: int, max_tokens: int | None, estimated_tokens: int, limit: int) -> int:
    """Return how many tokens a request reserves; what it uses is settled when it has ended.

    An answer is as long as `max_tokens`, or as the key's answers have been where the request names no limit. Clients
    name limits that they never reach, so what goes beyond a quarter of the key's limit counts only as far as it is
    likely: a request that reserved the whole minute would wait for ever beside shorter ones.
    """
    likely = prompt_tokens + estimated_tokens
    if max_tokens is None:
        return min(limit, likely)
    return min(limit, prompt_tokens + max_tokens, max(limit // 4, likely))


_RETRY_S = 1.0  # at least


class RateLimitedError(MeshError):
    """A limit of the key is reached."""

    code = "rate_limited"

    def __init__(self, limit: LimitName, most: int, wait_s: float) -> None:
        unit = "requests in progress" if limit == "streams" else f"{limit} in any minute"
        super().__init__(f"this API key may have {most} {unit}", hint="", retry_after_s=max(_RETRY_S, wait_s))
        self.limit = limit


class TooLargeForKeyError(MeshError):
    """One request alone is more than the key may have in a minute. To send it again does not help."""

    code = "too_large_for_key"

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            f"the prompt has {tokens} tokens, and this API key may have {most} in any minute", hint="shorten the prompt"
        )
        self.limit: LimitName = "tokens"


RETRY_S = 1.0  # between asks of an owner that does not answer
TELL_S = 1.0  # between asks that need nothing
PATIENCE_S = 2.0  # of one request, for a lease


class Taken(NamedTuple):
    """Hold what one request has taken, and where it can be given back."""

    source: Budget | BudgetLease
    parts: tuple[LeasePart, ...]
    here: int = 0  # slot of `Meter._apart`, where a lease was used


class Meter:
    """The limits of one key at this frontend.

    The frontend that owns the key takes from the key's budget. Another one takes from leases of it, and from a part
    of the limits while the owner does not answer.
    """

    def __init__(self, usage: Usage, limits: KeyLimits, sharing: LimitSharing, name: str = "") -> None:
        """`name`: of the budget, which all frontends know; default: that of the usage."""
        self.usage = usage
        self.name = name or usage.name
        self.limits = limits
        self.estimate = Estimate()
        self.in_progress = 0
        self._sharing = sharing
        self._lease = BudgetLease(self.name, limits)
        self._apart = Budget(limits)  # counts what was used here by leases: what counts when the owner is silent
        self._silent_until = 0.0
        self._streams_refused_until = 0.0
        self._owner = sharing.owners.own
        self._version = -1
        self._asking: asyncio.Task[None] | None = None
        self._waiting = (0, 0, 0)  # requests, tokens and streams
        self._told_at = 0.0
        self._usual = (1, 1)  # what one request takes

    def set_limits(self, limits: KeyLimits) -> None:
        """Take new limits. What was used before still counts."""
        if limits != self.limits:
            self.limits = self._lease.limits = limits

    async def begin(self) -> "KeyVisit":
        """Let a request in. Raise RateLimitedError."""
        taken = await self._obtain(1, 0, 1)
        self._count(+1)
        return KeyVisit(self, taken)

    async def reserve(self, tokens: int) -> Taken:
        """Take tokens. Raise RateLimitedError."""
        self._usual = (1, tokens)
        return await self._obtain(0, tokens, 0)

    async def _obtain(self, requests: int, tokens: int, streams: int) -> Taken:
        """Take what a request needs. Wait for the owner of the key only if there is no lease to take it from."""
        found = self._try(requests, tokens, streams)
        if found is None:
            self._wait(requests, tokens, streams, +1)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while (found := self._try(requests, tokens, streams)) is None:
                        await asyncio.shield(self._ask(requests, tokens))
            except TimeoutError:
                found = OverLimit("requests" if requests else "tokens", RETRY_S)
            finally:
                self._wait(requests, tokens, streams, -1)
        if isinstance(found, OverLimit):
            raise self.refused(found)
        return found

    def _wait(self, requests: int, tokens: int, streams: int, sign: int) -> None:
        before = self._waiting
        self._waiting = before[0] + sign * requests, before[1] + sign * tokens, before[2] + sign * streams

    def _try(self, requests: int, tokens: int, streams: int) -> Taken | OverLimit | None:
        """Return what was taken, what is lacking, or None if the owner has to be asked."""
        now = self._sharing.clock()
        budget = self._budget(now)
        if budget is not None:
            return self._from(budget, now, requests, tokens, streams)
        lease = self._lease
        if streams and self.limits.streams is not None and self.in_progress >= lease.streams:
            return OverLimit("streams", 0.0) if now < self._streams_refused_until else None
        refused = lease.refusal(now)
        if refused is not None and refused.limit == "tokens" and not lease.tokens:
            return refused  # its prompt need not be read
        parts = lease.take(now, requests, tokens)
        if parts is None:
            return refused
        self._apart.charge(now, requests, tokens)
        self._sharing.watch(self)
        if lease.is_low and refused is None and self._asking is None:
            self._ask(*self._usual, is_ahead=True)
        return Taken(lease, parts, slot_of(now))

    def _from(self, budget: Budget, now: float, requests: int, tokens: int, streams: int) -> Taken | OverLimit:
        if streams and budget.streams_free(now, self._sharing.owners.own) <= self.in_progress:
            return OverLimit("streams", 0.0)
        lookahead = 1 if streams and budget.tokens is not None else 0  # else its prompt need not be read
        found = budget.take(now, requests, tokens + lookahead)
        if isinstance(found, OverLimit):
            return found
        budget.give_back(found, 0, lookahead)
        return Taken(budget, (LeasePart(0, found, requests, tokens),))

    def _budget(self, now: float) -> Budget | None:
        """Return the budget to take from: the key's own, or a part of the limits; None if leases are to be used."""
        owners = self._sharing.owners
        if self._version != owners.version or not owners.is_joined:
            self._follow(now)
        if self._owner == owners.own:
            try:
                return self._sharing.owned.budget(now, self.name, self.limits)
            except MeshError:
                return self._part()
        if not self._owner:
            return self._part()
        if now < self._silent_until:
            return self._part()
        if self._silent_until:  # it is asked again, and no request waits for that
            if self._asking is None:
                self._ask(0, 0)
            return self._part()
        return None

    def _follow(self, now: float) -> None:
        """Find the owner again: the frontends have changed."""
        owners, owned = self._sharing.owners, self._sharing.owned
        before, self._owner, self._version = self._owner, owners.owner(self.name), owners.version
        if self._owner == before:
            return
        self._silent_until = self._streams_refused_until = 0.0
        if self._owner == owners.own:
            budget = owned.budget(now, self.name, self.limits)
            budget.hold(now, owners.own, self.in_progress, self.in_progress, math.inf)
            self._lease = BudgetLease(self.name, self.limits)
        elif before == owners.own:
            self._sharing.watch(self)

    def recall(self) -> Recalled | None:
        """Return what is known here of the key's use at other frontends."""
        used = self._lease.used()
        return None if used is None else Recalled(used, self._apart.uses(self._sharing.clock()))

    def _part(self) -> Budget:
        """Return a fair part of the limits, with what was used here."""
        count = self._sharing.owners.count
        part = KeyLimits(*(None if limit is None else max(1, limit // count) for limit in self.limits.all))
        if self._apart.limits != part:
            self._apart.set_limits(part)
        return self._apart

    def _ask(self, requests: int, tokens: int, *, is_ahead: bool = False) -> "asyncio.Task[None]":
        """Ask the owner, unless that is being done. Return the task. `is_ahead`: for requests still to come."""
        if self._asking is None:
            need = (requests, tokens) if is_ahead else self._lease.lacking(requests, tokens)
            self._asking = asyncio.create_task(self._renew(need), name=f"lease of {self.name}")
            self._sharing.spawn(self._asking)
        return self._asking

    async def _renew(self, need: tuple[int, int]) -> None:
        sharing, lease = self._sharing, self._lease
        try:
            waiting, streams = self._waiting, self.in_progress
            self._told_at = sharing.clock()
            asked = lease.ask(self._told_at, sharing.owners.own, self._owner, need, waiting, streams)
            grant = await sharing.ask(asked)
            now = sharing.clock()
            lease.on_grant(now, grant)
            sharing.watch(self)
            self._silent_until = 0.0
            if self.limits.streams is not None and grant.streams < streams + waiting[2]:
                self._streams_refused_until = now + TELL_S / 2
        except MeshError:
            self._silent_until = sharing.clock() + RETRY_S
        finally:
            self._asking = None

    def tick(self, now: float) -> bool:
        """Give back what is not used, and tell the owner of streams. Return whether there may be more to do."""
        if self._budget(now) is not None and not self._silent_until:
            return False  # it does not take from leases
        self._lease.tidy(now)
        has_news = self._lease.has_news(self.in_progress) or self._silent_until > 0
        if has_news and self._asking is None and now - self._told_at >= TELL_S:
            self._ask(0, 0)
        return bool(self.in_progress) or has_news or not self._lease.is_empty

    def settle(self, taken: Taken, requests: int, reserved: int, used: int) -> None:
        """Give back `requests` and what was reserved and not used, or charge what was used beyond that."""
        unused = max(0, reserved - used)
        self._give_back(taken, requests, unused)
        if used <= reserved:
            return
        now = self._sharing.clock()
        if isinstance(taken.source, BudgetLease):
            self._lease.owe(used - reserved)
            self._apart.charge(now, 0, used - reserved)
        else:
            taken.source.charge(now, 0, used - reserved)

    def _give_back(self, taken: Taken, requests: int, tokens: int) -> None:
        if isinstance(taken.source, BudgetLease):
            self._apart.give_back(taken.here, requests, tokens)
        for part in reversed(taken.parts):
            back = min(requests, part.requests), min(tokens, part.tokens)
            requests, tokens = requests - back[0], tokens - back[1]
            if isinstance(taken.source, BudgetLease):
                taken.source.give_back(part.epoch, part.slot, *back)
            else:
                taken.source.give_back(part.slot, *back)

    def leave(self) -> None:
        """Note that a request has ended."""
        self._count(-1)

    def refused(self, over: OverLimit) -> RateLimitedError:
        """Count a refusal, and return it as an error."""
        most: Mapping[LimitName, int | None] = {
            "requests": self.limits.requests,
            "tokens": self.limits.tokens,
            "streams": self.limits.streams,
        }
        self.usage.refuse(over.limit)
        return RateLimitedError(over.limit, most[over.limit] or 0, over.wait_s)

    def is_idle(self) -> bool:
        """Return whether nothing counts any more."""
        now = self._sharing.clock()
        budget = self._budget(now)
        is_used = budget is not None and not budget.is_idle(now)
        return not (self.in_progress or is_used or not self._lease.is_empty or not self._apart.is_idle(now))

    def headers(self) -> Mapping[str, str]:
        """Return what is left of the limits, as headers."""
        now = self._sharing.clock()
        budget = self._budget(now)
        if budget is None:
            return self._lease.left().headers()
        left = left_of(budget, now)
        return Left(self.limits, left.requests, left.tokens, left.reset_requests_s, left.reset_tokens_s).headers()

    def _count(self, change: int) -> None:
        self.in_progress += change
        metrics.STREAMS.labels(self.usage.name).inc(change)
        budget = self._budget(self._sharing.clock())
        if budget is not None and self.limits.streams is not None:
            own = self._sharing.owners.own
            budget.hold(self._sharing.clock(), own, self.in_progress, self.in_progress, math.inf)


class KeyVisit:
    """One request of a limited key. Implements kvmesh.frontend.callers.Visit."""

    __slots__ = ("_is_over", "_meter", "_request", "_requests", "_reserved", "_tokens")

    def __init__(self, meter: Meter, taken: Taken) -> None:
        self._meter = meter
        self._request = taken
        self._tokens: Taken | None = None
        self._requests = 0  # to be given back
        self._reserved = 0
        self._is_over = False

    async def reserve(self, prompt_tokens: int, max_tokens: int | None, answers: int = 1) -> None:
        """Take the tokens of a request; `max_tokens` are those of all its answers, None if it names no limit.

        Raise RateLimitedError, TooLargeForKeyError. Then the request does not count.
        """
        most = self._meter.limits.tokens
        if most is None:
            return
        try:
            if prompt_tokens > most:
                self._meter.usage.refuse("tokens")
                raise TooLargeForKeyError(prompt_tokens, most)
            wanted = reserved_tokens(prompt_tokens, max_tokens, self._meter.estimate.tokens * answers, most)
            self._tokens = await self._meter.reserve(wanted)
            self._reserved = wanted
        except MeshError:
            self._requests = 1
            raise

    def end(self, used_tokens: int, answers_tokens: Iterable[int] = ()) -> None:
        """Count what was used; `answers_tokens` are the lengths of the answers. A second call does nothing."""
        if self._is_over:
            return
        self._is_over = True
        for tokens in answers_tokens:
            self._meter.estimate.note(tokens)
        if self._requests:
            self._meter.settle(self._request, self._requests, 0, 0)
        if self._tokens is not None:
            self._meter.settle(self._tokens, 0, self._reserved, used_tokens)
        self._meter.leave()
