"""Track what one key has used and may still use. Pure: the time is an argument."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct

from kvmesh.frontend.keys.window import SLOT_S, SlidingWindow, slot_of

HOLD_S = 3.0  # a frontend that says nothing for so long holds no streams any more
LimitName = Literal["requests", "tokens", "streams"]


class KeyLimits(Struct, frozen=True):
    """Hold how much a key may use. None: as much as it likes."""

    requests: int | None = None  # in any minute
    tokens: int | None = None  # in any minute, of prompts and answers
    streams: int | None = None  # requests in progress

    @property
    def all(self) -> tuple[int | None, int | None, int | None]:
        return self.requests, self.tokens, self.streams

    def __bool__(self) -> bool:
        return any(limit is not None for limit in self.all)


class OverLimit(NamedTuple):
    """Says which limit is reached, and when to try again."""

    limit: LimitName
    wait_s: float


class Budget:
    """Keeps the limits of one key for all frontends. There is one such object in the mesh at a time: its owner's."""

    def __init__(self, limits: KeyLimits) -> None:
        self.requests: SlidingWindow | None = None
        self.tokens: SlidingWindow | None = None
        self._held: dict[str, tuple[int, float]] = {}  # streams of a frontend, and until when that counts
        self.limits = KeyLimits()
        self.set_limits(limits)

    def set_limits(self, limits: KeyLimits) -> None:
        """Take new limits. What was used before still counts."""
        self.requests = _limited(self.requests, limits.requests)
        self.tokens = _limited(self.tokens, limits.tokens)
        self.limits = limits

    def take(self, now: float, requests: int, tokens: int) -> int | OverLimit:
        """Use requests and tokens; return the slot to which they can be given back, or what is lacking."""
        if self.requests is not None and requests > self.requests.free(now):
            return OverLimit("requests", self.requests.wait_s(now, requests))
        if self.tokens is not None and tokens > self.tokens.free(now):
            return OverLimit("tokens", self.tokens.wait_s(now, tokens))
        self.charge(now, requests, tokens)
        return slot_of(now)

    def charge(self, now: float, requests: int, tokens: int) -> None:
        """Count what was used, whether or not it was free."""
        if requests and self.requests is not None:
            self.requests.charge(now, requests)
        if tokens and self.tokens is not None:
            self.tokens.charge(now, tokens)

    def give_back(self, slot: int, requests: int, tokens: int) -> None:
        """Undo a use."""
        if requests and self.requests is not None:
            self.requests.give_back(slot, requests)
        if tokens and self.tokens is not None:
            self.tokens.give_back(slot, tokens)

    def hold(self, now: float, holder: str, in_use: int, wanted: int, lasts_s: float = HOLD_S) -> int:
        """Let `holder` have up to `wanted` streams for `lasts_s`, never fewer than it uses. Return how many it has."""
        granted = max(in_use, min(wanted, self.streams_free(now, holder)))
        if granted:
            self._held[holder] = (granted, now + lasts_s)
        else:
            self._held.pop(holder, None)
        return granted

    def streams_free(self, now: float, holder: str = "") -> int:
        """Return how many streams nobody but `holder` has."""
        if self.limits.streams is None:
            return 2**31
        for name in [name for name, (_, until) in self._held.items() if until <= now]:
            del self._held[name]
        others = sum(count for name, (count, _) in self._held.items() if name != holder)
        return max(0, self.limits.streams - others)

    def held(self, holder: str) -> int:
        """Return how many streams a frontend has."""
        return self._held.get(holder, (0, 0.0))[0]

    def used(self, now: float) -> tuple[int, int]:
        """Return the requests and tokens that count now."""
        windows = (self.requests, self.tokens)
        requests, tokens = (0 if window is None else window.limit - window.free(now) for window in windows)
        return requests, tokens

    def is_idle(self, now: float) -> bool:
        """Return whether nothing counts any more: a new budget would be the same."""
        self.streams_free(now)
        return not self._held and not any(self.used(now))

    def uses(self, now: float) -> list[tuple[float, int, int]]:
        """Return what counts now: how old it is, requests and tokens."""
        found: dict[int, list[int]] = {}
        for n, window in enumerate((self.requests, self.tokens)):
            for slot, amount in () if window is None else window.uses(now):
                found.setdefault(slot, [0, 0])[n] = amount
        return [(max(0.0, now - (slot + 0.5) * SLOT_S), used[0], used[1]) for slot, used in sorted(found.items())]

    def take_over(self, now: float, uses: Iterable[tuple[float, int, int]]) -> None:
        """Count what `uses` of another budget returned."""
        for age_s, requests, tokens in uses:
            for window, amount in ((self.requests, requests), (self.tokens, tokens)):
                if window is not None and amount:
                    window.count_past(now, now - age_s, amount)

    def assume_used(self, now: float, requests: int, tokens: int, like: Sequence[tuple[float, int, int]] = ()) -> None:
        """Count so much as used in the last minute, at the times of the uses in `like`, evenly if there are none."""
        of_requests, of_tokens = [(age_s, r) for age_s, r, _ in like if r], [(age_s, t) for age_s, _, t in like if t]
        for window, amount, known in ((self.requests, requests, of_requests), (self.tokens, tokens, of_tokens)):
            total = sum(used for _, used in known)
            if window is None:
                continue
            if not total:
                window.spread(now, amount)
                continue
            so_far = 0
            for age_s, used in known:
                before, so_far = amount * so_far // total, so_far + used
                window.count_past(now, now - age_s, amount * so_far // total - before)


class Left(Struct, frozen=True):
    """Hold what is left of the limits of a key, as its clients are told."""

    limits: KeyLimits
    requests: int = 0
    tokens: int = 0
    reset_requests_s: float = 0.0
    reset_tokens_s: float = 0.0

    def headers(self) -> Mapping[str, str]:
        """Return OpenAI's headers for the limits that there are."""
        headers: dict[str, str] = {}
        if self.limits.requests is not None:
            headers |= _headers("requests", self.limits.requests, self.requests, self.reset_requests_s)
        if self.limits.tokens is not None:
            headers |= _headers("tokens", self.limits.tokens, self.tokens, self.reset_tokens_s)
        return headers


def left_of(budget: Budget, now: float) -> Left:
    requests, tokens = budget.requests, budget.tokens
    return Left(
        budget.limits,
        0 if requests is None else requests.free(now),
        0 if tokens is None else tokens.free(now),
        0.0 if requests is None else requests.reset_s(now),
        0.0 if tokens is None else tokens.reset_s(now),
    )


def _headers(name: str, limit: int, left: int, reset_s: float) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(limit),
        f"x-ratelimit-remaining-{name}": str(max(0, left)),
        f"x-ratelimit-reset-{name}": f"{reset_s:.3f}s",
    }


def _limited(window: SlidingWindow | None, limit: int | None) -> SlidingWindow | None:
    if limit is None:
        return None
    if window is None:
        return SlidingWindow(limit)
    window.limit = limit
    return window
