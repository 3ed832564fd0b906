"""Decide when a worker's card reports again how fast its tiers and its pulls are. Pure; the time is a parameter.

Rates are live averages. A card is written for all routers to read, so it changes seldom, and only for what matters.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, runtime_checkable

from kvmesh.workers.engine import EngineInfo
from kvmesh.workers.tiers import TierReport

EVERY_S = 10.0  # between two cards, at least
FIRST_S = 1.0  # ... until everything has been measured once
CHANGE = 0.2  # of a figure: less is not worth a card


@runtime_checkable
class ReportsTiers(Protocol):
    """An engine of ours, which measures its tiers and its pulls."""

    @property
    def tier_report(self) -> Callable[[], TierReport]: ...


class CardTiers:
    """Compares the figures of a card with those of now."""

    def __init__(self) -> None:
        self._told_s = 0.0

    def due(self, info: EngineInfo, report: TierReport, now: float) -> EngineInfo | None:
        """Return what the card is to say now, None if it may stay as it is."""
        if not report.tiers and not info.tiers and not info.kv_print:
            return None
        told = TierReport(info.tiers, info.prefill_token_s, info.pull_block_s, info.pull_latency_s)
        if len(report.tiers) == len(told.tiers):  # else one was switched off
            before, after = _figures(told), _figures(report)
            is_first = any(not old and new for old, new in zip(before, after, strict=True))
            if now - self._told_s < (FIRST_S if is_first else EVERY_S):
                return None
            if not any(abs(new - old) > CHANGE * old for old, new in zip(before, after, strict=True)):
                return None
        self._told_s = now
        return replace(
            info,
            tiers=report.tiers,
            prefill_token_s=report.prefill_token_s,
            pull_block_s=report.pull_block_s,
            pull_latency_s=report.pull_latency_s,
        )


def _figures(report: TierReport) -> list[float]:
    pairs = [(tier.block_s, tier.latency_s) for tier in report.tiers]
    pairs.append((report.pull_block_s, report.pull_latency_s))
    return [report.prefill_token_s, *[figure for block_s, rest_s in pairs for figure in (block_s, block_s + rest_s)]]
