"""A card reports how fast a worker's tiers are, seldom."""

from collections.abc import Sequence

from protocol.messages import NO_LAYOUT, CardTier
from protocol.tiers import Tier
from workers.card_tiers import EVERY_S, CardTiers
from workers.engine import EngineInfo
from workers.tiers import TierReport

INFO = EngineInfo("m", "", 16, 8, 64, 4, NO_LAYOUT, "", tiers=(CardTier(tier=Tier.HOST, blocks=100),))


def report(block_s: float, token_s: float = 0.001) -> TierReport:
    return TierReport((CardTier(tier=Tier.HOST, blocks=100, block_s=block_s),), token_s)


def told(reports: Sequence[tuple[float, TierReport]]) -> list[float]:
    """Return when the card was written again. Each report has its time."""
    cards, info, when = CardTiers(), INFO, list[float]()
    for now, one in reports:
        if (fresh := cards.due(info, one, now)) is not None:
            info = fresh
            when.append(now)
            assert (info.tiers, info.prefill_token_s) == (one.tiers, one.prefill_token_s)
    return when


def test_the_first_figures_are_told_at_once() -> None:
    assert told([(100.0, report(0.0, 0.0)), (101.0, report(0.0)), (102.5, report(0.004))]) == [101.0, 102.5]


def test_small_changes_are_not_told() -> None:
    assert told([(100.0, report(0.004)), (200.0, report(0.0045))]) == [100.0]


def test_large_changes_are_told_now_and_then() -> None:
    moments = [(100.0 + second, report(0.004 * 1.5**second)) for second in range(25)]
    assert told(moments) == [100.0, 100.0 + EVERY_S, 100.0 + 2 * EVERY_S]


def test_a_worker_without_tiers_tells_nothing() -> None:
    assert told([(100.0, TierReport())]) == []
