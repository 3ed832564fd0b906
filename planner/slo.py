"""Read SLOs as users state them, judge them over windows, and turn an aim into the planner's price. Pure.

A statement is "p95 TTFT <= 0.5 s over 5 min": of the requests in any five minutes, 95 % get their first token in 0.5 s.
"""

import re
from collections import deque
from collections.abc import Sequence
from typing import Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.planner.model import PlannerConfig, SloCounts, Traffic
from kvmesh.protocol.errors import ConfigError

Aim = Literal["price", "budget", "target"]

DEFAULT_WINDOW_S = 300.0
LEAST_REQUESTS = 20.0  # in a window; a percentile of fewer is chance
BUDGET_PRICE = 1000.0  # GPU time within the budget counts for next to nothing beside a miss
MOST_PRICE = 1000.0
_UNITS_S = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_UNIT = "(ms|s|min|h)"
_STATEMENT = re.compile(
    rf"p(\d+(?:\.\d+)?)\s+(ttft|itl)\s*<=\s*(\d+(?:\.\d+)?)\s*{_UNIT}(?:\s+over\s+(\d+(?:\.\d+)?)\s*{_UNIT})?",
    re.IGNORECASE,
)
EXAMPLE = "for example 'p95 TTFT <= 0.5 s over 5 min'"

C = TypeVar("C", bound=PlannerConfig)


class SloStatement(Struct, frozen=True, kw_only=True):
    """A share of the requests in each window keeps a limit."""

    of: Literal["ttft", "itl"]
    share: float
    limit_s: float
    window_s: float

    @property
    def text(self) -> str:
        return f"p{100 * self.share:g} {self.of.upper()} <= {self.limit_s:g} s over {self.window_s:g} s"


class SloState(Struct, frozen=True, kw_only=True):
    """A statement, and the share of the requests of the last window that kept its limit. None: too few requests."""

    of: Literal["ttft", "itl"]
    statement: str
    share: float | None
    requests: float
    is_kept: bool | None


def read_statement(text: str) -> SloStatement:
    """Return the statement. Raise ConfigError if it cannot be read, or cannot be judged."""
    found = _STATEMENT.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"no SLO: {text!r}", hint=EXAMPLE)
    percent, of, limit, unit, window, window_unit = found.groups()
    share, limit_s = float(percent) / 100, float(limit) * _UNITS_S[unit.lower()]
    window_s = float(window) * _UNITS_S[window_unit.lower()] if window else DEFAULT_WINDOW_S
    if not 0 < share < 1 or limit_s <= 0 or not 1 <= window_s <= 86_400:
        raise ConfigError(
            f"the SLO {text!r} cannot be judged", hint="p50 to p99.9, a time above 0, a window of a second to a day"
        )
    return SloStatement(of="ttft" if of.lower() == "ttft" else "itl", share=share, limit_s=limit_s, window_s=window_s)


def read_statements(texts: Sequence[str]) -> list[SloStatement]:
    """Return the statements. Raise ConfigError if two are about the same time: a planner keeps one limit of each."""
    statements = [read_statement(text) for text in texts]
    if len({statement.of for statement in statements}) < len(statements):
        raise ConfigError(f"several SLOs of one time: {'; '.join(texts)}", hint="give one of TTFT and one of ITL")
    return statements


def with_slo(config: C, texts: Sequence[str], aim: Aim) -> C:
    """Return the settings with the limits of the statements, and with the price that suits the aim.

    A target of a share A is the price 1 / (1 - A): with it the planner is ready for the quantile A of its forecasts.
    A budget makes GPU time within `max_gpus` nearly free. Raise ConfigError for a target without a statement.
    """
    statements = read_statements(texts)
    limits = {f"{statement.of}_slo_s": statement.limit_s for statement in statements}
    config = replace(config, **limits)
    if aim == "budget":
        return replace(config, miss_cost=BUDGET_PRICE)
    if aim == "target":
        if not statements:
            raise ConfigError("a target needs an SLO with a percentile", hint=f"set --slo, {EXAMPLE}")
        share = max(statement.share for statement in statements)
        return replace(config, miss_cost=min(MOST_PRICE, max(1.01, 1 / (1 - share))))
    return config


class SloWatch:
    """Judges statements over the traffic of their windows."""

    def __init__(self, statements: Sequence[SloStatement]) -> None:
        self._statements = statements
        self._pieces: deque[tuple[float, SloCounts]] = deque()  # when a piece ended
        self._longest_s = max((statement.window_s for statement in statements), default=0.0)

    def hear(self, piece: Traffic | None) -> None:
        """Take in a piece of traffic."""
        if piece is None or piece.slo_counts is None or not self._statements:
            return
        self._pieces.append((piece.end_s, piece.slo_counts))
        while self._pieces[0][0] <= piece.end_s - self._longest_s:
            self._pieces.popleft()

    def states(self, at_s: float) -> tuple[SloState, ...]:
        """Return how each statement is kept in the window that ends now."""
        return tuple(self._state(statement, at_s) for statement in self._statements)

    def _state(self, statement: SloStatement, at_s: float) -> SloState:
        counts = [counts for end_s, counts in self._pieces if end_s > at_s - statement.window_s]
        requests = sum(one.ttft if statement.of == "ttft" else one.itl for one in counts)
        within = sum(one.ttft_within if statement.of == "ttft" else one.itl_within for one in counts)
        share = min(1.0, within / requests) if requests >= LEAST_REQUESTS else None
        return SloState(
            of=statement.of,
            statement=statement.text,
            share=share,
            requests=requests,
            is_kept=None if share is None else share >= statement.share,
        )


def sentence_of(state: SloState) -> str:
    """Return the state for people."""
    if state.share is None:
        return f"slo: {state.statement}: not known, {state.requests:.0f} requests in the window"
    kept = "kept" if state.is_kept else "MISSED"
    return f"slo: {state.statement}: {kept}, {state.share:.1%} of {state.requests:.0f} requests within"
