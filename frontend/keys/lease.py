"""Hold what the owner of a key's budget has granted to this frontend. Pure: the time is an argument."""

import math
from collections import deque
from typing import NamedTuple

from msgspec import Struct

from kvmesh.frontend.keys.budget import KeyLimits, Left, LimitName, OverLimit
from kvmesh.protocol.messages import MAX_BUDGET_RETURNS, BudgetAsk, BudgetGrant, BudgetReturn

AHEAD_S = 0.5  # a lease is as large as what is used in this time
SMOOTH_S = 1.0  # of the rates of use
IDLE_S = 1.0  # what is not used for so long is given back
REFUSED_S = 0.5  # a refusal is believed for so long: others give back what they do not use
FEW_USES = 4  # of one lease: so few requests do not ask ahead
SPARE_STREAMS = 0.25  # of those in use


class LeasePart(NamedTuple):
    """Hold what was taken from one grant."""

    epoch: int
    slot: int
    requests: int
    tokens: int


class _Lot(Struct):
    epoch: int
    slot: int
    requests: int
    tokens: int
    used_at: float


class BudgetLease:
    """Tracks grants, what is left of them, and what has to be said with the next ask."""

    def __init__(self, key: str, limits: KeyLimits) -> None:
        self.key = key
        self.limits = limits
        self.streams = 0  # granted
        self._lots: deque[_Lot] = deque()
        self._returns: dict[tuple[int, int], list[int]] = {}  # (epoch, slot): requests, tokens
        self._debt_tokens = 0
        self._left: Left | None = None
        self._refused: tuple[float, OverLimit] | None = None  # until when, and what was said
        self._used = [0, 0]  # requests and tokens since `_asked_at`
        self._rates = [0.0, 0.0]  # of both, a second
        self._asked_at = -math.inf
        self._granted = (0, 0)  # what there was after the last grant
        self._uses = 0  # since then

    @property
    def requests(self) -> int:
        return sum(lot.requests for lot in self._lots)

    @property
    def tokens(self) -> int:
        return sum(lot.tokens for lot in self._lots)

    def take(self, now: float, requests: int, tokens: int) -> tuple[LeasePart, ...] | None:
        """Use requests and tokens; return where they came from, None if the lease has too few."""
        if self.limits.requests is None:
            requests = 0
        if self.limits.tokens is None:
            tokens = 0
        if requests > self.requests or tokens > self.tokens:
            return None
        self._uses += 1
        self._used[0] += requests
        self._used[1] += tokens
        parts: list[LeasePart] = []
        for lot in self._lots:
            part = LeasePart(lot.epoch, lot.slot, min(requests, lot.requests), min(tokens, lot.tokens))
            if part.requests or part.tokens:
                lot.requests -= part.requests
                lot.tokens -= part.tokens
                lot.used_at = now
                requests -= part.requests
                tokens -= part.tokens
                parts.append(part)
        while self._lots and not (self._lots[0].requests or self._lots[0].tokens):
            self._lots.popleft()
        return tuple(parts)

    def give_back(self, epoch: int, slot: int, requests: int, tokens: int) -> None:
        """Keep for the owner what was not used."""
        if requests or tokens:
            entry = self._returns.setdefault((epoch, slot), [0, 0])
            entry[0] += requests
            entry[1] += tokens

    def owe(self, tokens: int) -> None:
        """Tell the owner of tokens that were used beyond the lease."""
        if self.limits.tokens is not None:
            self._debt_tokens += tokens

    def lacking(self, requests: int, tokens: int) -> tuple[int, int]:
        """Return what the lease lacks of an amount."""
        return (
            0 if self.limits.requests is None else max(0, requests - self.requests),
            0 if self.limits.tokens is None else max(0, tokens - self.tokens),
        )

    @property
    def is_low(self) -> bool:
        """Return whether most of what was granted last is used, and more should be asked for before it is needed."""
        if self._uses < FEW_USES:
            return False
        requests, tokens = self._granted
        return self.requests * 4 < requests or self.tokens * 4 < tokens

    def refusal(self, now: float) -> OverLimit | None:
        """Return what the owner has refused a moment ago."""
        if self._refused is None or now >= self._refused[0]:
            return None
        until, over = self._refused
        return OverLimit(over.limit, max(0.0, over.wait_s - (now - (until - REFUSED_S))))

    def ask(
        self,
        now: float,
        asker: str,
        owner: str,
        need: tuple[int, int] = (0, 0),
        waiting: tuple[int, int, int] = (0, 0, 0),
        streams: int = 0,
    ) -> BudgetAsk:
        """Return what to ask the owner for, and forget what it is told so. `need` is what one request lacks, `waiting`
        what all lack, streams last; `streams` are those in use."""
        ahead = self._ahead(now)
        want = [max(0, lack + rate - has) for lack, rate, has in zip(waiting[:2], ahead, self._held(), strict=True)]
        if not any(need):
            want = [0, 0]  # it is not needed: only told
        epoch, returned = self._take_returns()
        debt, self._debt_tokens = self._debt_tokens, 0
        soon = streams + waiting[2]
        wanted_streams = 0 if self.limits.streams is None else soon + int(soon * SPARE_STREAMS)
        self.streams = min(self.streams, wanted_streams)  # given up before the owner hears of it
        return BudgetAsk(
            key=self.key,
            asker=asker,
            owner=owner,
            limit_requests=self.limits.requests,
            limit_tokens=self.limits.tokens,
            limit_streams=self.limits.streams,
            need_requests=need[0],
            need_tokens=need[1],
            want_requests=max(need[0], want[0]),
            want_tokens=max(need[1], want[1]),
            epoch=epoch,
            returned=returned,
            debt_tokens=debt,
            streams=streams,
            want_streams=wanted_streams,
        )

    def _ahead(self, now: float) -> tuple[int, int]:
        """Return what is used in AHEAD_S, as seen since the last ask."""
        passed_s = max(0.01, now - self._asked_at)
        weight = 1 - math.exp(-passed_s / SMOOTH_S)
        self._rates = [
            rate + weight * (used / passed_s - rate) for rate, used in zip(self._rates, self._used, strict=True)
        ]
        self._used, self._asked_at = [0, 0], now
        requests, tokens = (int(rate * AHEAD_S) for rate in self._rates)
        return requests, tokens

    def _held(self) -> tuple[int, int]:
        return self.requests, self.tokens

    def _take_returns(self) -> tuple[int, tuple[BudgetReturn, ...]]:
        """Return what goes back to the latest owner. Earlier owners are gone, and what they granted stays used."""
        if not self._returns:
            return 0, ()
        epoch = next(reversed(self._returns))[0]
        entries = [(slot, amounts) for (of, slot), amounts in self._returns.items() if of == epoch]
        self._returns.clear()
        latest = sorted(entries)[-MAX_BUDGET_RETURNS:]
        return epoch, tuple(BudgetReturn(slot=slot, requests=r, tokens=t) for slot, (r, t) in latest)

    def on_grant(self, now: float, grant: BudgetGrant) -> None:
        """Take what the owner has granted."""
        if grant.requests or grant.tokens:
            self._lots.append(_Lot(grant.epoch, grant.slot, grant.requests, grant.tokens, now))
            self._granted, self._uses = (self.requests, self.tokens), 0
        self.streams = grant.streams
        left = Left(self.limits, grant.left_requests, grant.left_tokens, grant.reset_requests_s, grant.reset_tokens_s)
        self.note_left(left)
        self._refused = None
        if grant.lacking in ("requests", "tokens"):
            limit: LimitName = "requests" if grant.lacking == "requests" else "tokens"
            self._refused = now + REFUSED_S, OverLimit(limit, grant.wait_s)

    def note_left(self, left: Left) -> None:
        """Remember what is left of the whole limits."""
        self._left = left

    def used(self) -> tuple[int, int] | None:
        """Return what was used of the whole limits, as the owner said last; None if it never did."""
        if (left := self._left) is None:
            return None
        return (self.limits.requests or 0) - left.requests, (self.limits.tokens or 0) - left.tokens

    def left(self) -> Left:
        """Return what is left of the whole limits, as far as it is known here."""
        if (left := self._left) is None:
            return Left(self.limits, self.limits.requests or 0, self.limits.tokens or 0)
        return Left(
            self.limits,
            left.requests + self.requests,
            left.tokens + self.tokens,
            left.reset_requests_s,
            left.reset_tokens_s,
        )

    def tidy(self, now: float) -> None:
        """Give back what was not used for a while."""
        for lot in [lot for lot in self._lots if now - lot.used_at >= IDLE_S]:
            self.give_back(lot.epoch, lot.slot, lot.requests, lot.tokens)
            self._lots.remove(lot)

    def has_news(self, streams: int) -> bool:
        """Return whether the owner has to hear something, or streams have to be renewed."""
        return bool(self._returns or self._debt_tokens or self.streams or (streams and self.limits.streams))

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is left to use or to tell."""
        return not (self._lots or self._returns or self._debt_tokens or self.streams)
