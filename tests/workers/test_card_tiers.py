"""A card reports how fast a worker's tiers are, seldom."""

from collections.abc import Sequence
from dataclasses import replace

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import NO_LAYOUT, CardTier, Role
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.card_tiers import EVERY_S, CardTiers
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import EngineInfo
from kvmesh.workers.engines.opening import open_engine
from kvmesh.workers.membership import make_card
from kvmesh.workers.service import Worker
from kvmesh.workers.tiers import TierReport
from tests.support.place import FakePlace

INFO = EngineInfo("m", "", 16, 8, 64, 4, NO_LAYOUT, "", tiers=(CardTier(tier=Tier.HOST, blocks=100),))


def report(block_s: float, token_s: float = 0.001) -> TierReport:
    return TierReport((CardTier(tier=Tier.HOST, blocks=100, block_s=block_s),), token_s)


def told(reports: Sequence[tuple[float, TierReport]], info: EngineInfo = INFO) -> list[float]:
    """Return when the card was written again. Each report has its time."""
    cards, when = CardTiers(), list[float]()
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
    assert told([(100.0, TierReport())], replace(INFO, tiers=())) == []


def test_a_tier_that_was_switched_off_leaves_the_card_at_once() -> None:
    assert told([(100.0, report(0.004)), (100.1, TierReport((), 0.001)), (100.2, TierReport((), 0.001))]) == [
        100.0,
        100.1,
    ]


async def test_a_worker_writes_its_card_again_when_it_has_measured() -> None:
    settings = WorkerConfig(
        engine="mock", model_path=str(CHECKPOINT_DIR), model="m", mock_speedup=0.0, kv_transfer="shm", kv_host_mib=1
    )
    engine, place = open_engine(settings), FakePlace()
    worker = Worker(engine, place)
    worker.info = await engine.start(WorkerId("w"), "127.0.0.1:1")
    [tier] = worker.info.tiers
    assert (tier.tier, tier.block_s) == (Tier.HOST, 0)
    await worker.tell_tiers()
    assert place.infos == []
    engine.awake._copies.stack.compute.note_step(100, 0, 0.2)  # type: ignore[attr-defined]
    await worker.tell_tiers()
    assert [info.prefill_token_s for info in place.infos] == [0.002]
    card = make_card(
        settings, WorkerId("w"), Role.AGGREGATED, replace(place.infos[0], tells_events=False), "h:1", [], ""
    )
    assert (card.tiers, card.prefill_token_s) == (worker.info.tiers, 0.002)
    await engine.stop()
