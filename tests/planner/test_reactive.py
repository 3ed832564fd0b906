"""The reactive loop's evidence: queues, caches and recent arrivals."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.planner.costs import Horizon
from kvmesh.planner.history import RecentTraffic
from kvmesh.planner.model import RoleFleet, WorkerLoad
from kvmesh.planner.reactive import Pressure, Rules, decode_pressure, prefill_pressure
from kvmesh.planner.sizing import Demand, Slo, decode_capacity
from tests.support.planning import an_8b

PROFILE = an_8b(speedup=0.125)  # 0.39 s for 2000 tokens
RULES = Rules(PROFILE, Slo(2.0, 0.25), 0.8, 1.0)
RECENT = RecentTraffic(Demand(6.0, 2000, 200), 20.0)
BATCH = decode_capacity(PROFILE, RECENT.demand, 0.25).batch


def worker(queued_tokens: int = 0, running: int = 0, waiting: int = 0, kv_tokens: int = 0) -> WorkerLoad:
    return WorkerLoad(
        name="w",
        queued_tokens=queued_tokens,
        running=running,
        waiting=waiting,
        kv_tokens=kv_tokens,
        total_kv_tokens=PROFILE.total_kv_tokens,
    )


def codes(pressure: Pressure) -> set[str]:
    return {reason.code for reason in pressure.reasons}


def test_short_queues_order_nothing() -> None:
    pressure = prefill_pressure(RULES, RoleFleet(ready=4), [worker(queued_tokens=2000)] * 4, RECENT)
    assert pressure.workers == 0
    assert not pressure.reasons


def test_a_queue_beyond_the_slo_orders_enough_workers() -> None:
    little = prefill_pressure(RULES, RoleFleet(ready=4), [worker(queued_tokens=15_000)] * 4, RECENT)
    much = prefill_pressure(RULES, RoleFleet(ready=4), [worker(queued_tokens=90_000)] * 4, RECENT)
    assert 4 < little.workers < much.workers
    assert codes(much) == {"prefill-queue"}


def test_a_queue_is_no_evidence_while_workers_are_starting() -> None:
    fleet = RoleFleet(ready=4, starting=1)
    assert prefill_pressure(RULES, fleet, [worker(queued_tokens=90_000)] * 4, RECENT).workers == 0
    assert decode_pressure(RULES, fleet, [worker(running=3 * BATCH)] * 4, RECENT).workers == 0


def test_arrivals_are_evidence_also_while_workers_are_starting() -> None:
    burst = RecentTraffic(Demand(40.0, 2000, 200), 20.0)
    pressure = prefill_pressure(RULES, RoleFleet(ready=2, starting=2), [], burst)
    assert pressure.workers > 10
    assert codes(pressure) == {"prefill-arrivals"}


def test_a_few_more_arrivals_than_usual_are_chance() -> None:
    """Four workers carry 8.1 requests/s. 9 requests in one second are no evidence, 9 a second for a minute are."""
    fleet = RoleFleet(ready=4)
    assert prefill_pressure(RULES, fleet, [], RecentTraffic(Demand(9.0, 2000, 200), 1.0)).workers == 0
    assert prefill_pressure(RULES, fleet, [], RecentTraffic(Demand(9.0, 2000, 200), 60.0)).workers > 4


def test_a_level_that_was_reached_during_that_time_is_what_workers_are_ordered_for() -> None:
    """The loop by itself, without prices, orders for the mean: its tables stay comparable."""
    jump = RecentTraffic(Demand(20.0, 2000, 200), 20.0, latest_rps=30.0)
    lasting = RecentTraffic(Demand(30.0, 2000, 200), 20.0)
    priced, fleet = replace(RULES, horizon=Horizon(60.0, 3.0)), RoleFleet(ready=4)
    for pressure in (prefill_pressure, decode_pressure):
        assert pressure(priced, fleet, [], jump).workers == pressure(priced, fleet, [], lasting).workers
        assert pressure(RULES, fleet, [], jump).workers < pressure(RULES, fleet, [], lasting).workers


def test_arrivals_of_the_first_seconds_are_no_evidence() -> None:
    """A minute that begins with a bunch looks like a rush; queues tell it if it is one."""
    fleet = RoleFleet(ready=4)
    assert prefill_pressure(RULES, fleet, [], RecentTraffic(Demand(40.0, 2000, 200), 5.0)).workers == 0
    assert (
        prefill_pressure(RULES, fleet, [worker(200_000)] * 4, RecentTraffic(Demand(40.0, 2000, 200), 5.0)).workers > 4
    )
    assert prefill_pressure(RULES, fleet, [], RecentTraffic(Demand(40.0, 2000, 200), 10.0)).workers > 4


def test_a_batch_that_breaks_the_itl_orders_decode_workers() -> None:
    pressure = decode_pressure(RULES, RoleFleet(ready=3), [worker(running=BATCH + 5)] * 3, RECENT)
    assert pressure.workers > 3
    assert codes(pressure) == {"decode-crowded"}


def test_full_kv_with_waiting_requests_orders_decode_workers() -> None:
    full = int(0.95 * PROFILE.total_kv_tokens)
    quiet = RecentTraffic(Demand(1.0, 2000, 200), 20.0)
    waited_for = [worker(running=5, waiting=1, kv_tokens=full)] * 2
    assert decode_pressure(RULES, RoleFleet(ready=2), waited_for, quiet).workers >= 3
    assert decode_pressure(RULES, RoleFleet(ready=2), [worker(running=5, kv_tokens=full)] * 2, quiet).workers == 0


def test_idle_workers_can_be_spared() -> None:
    assert prefill_pressure(RULES, RoleFleet(ready=9), [worker()] * 9, RECENT).least < 9
    assert decode_pressure(RULES, RoleFleet(ready=9), [worker()] * 9, RECENT).least < 9


def test_workers_with_a_queue_are_not_spared() -> None:
    quiet = RecentTraffic(Demand(0.1, 2000, 200), 60.0)
    queued = [worker(queued_tokens=8000)] * 3
    assert prefill_pressure(RULES, RoleFleet(ready=3), queued, quiet).least == 3
    running = [worker(running=int(0.75 * BATCH))] * 3
    assert decode_pressure(RULES, RoleFleet(ready=3), running, quiet).least == 3


def test_without_loads_no_worker_is_spared() -> None:
    assert prefill_pressure(RULES, RoleFleet(ready=9), [], RECENT).least == 9
    assert decode_pressure(RULES, RoleFleet(ready=9), [], RECENT).least == 9


def test_without_traffic_figures_queues_still_count() -> None:
    pressure = prefill_pressure(RULES, RoleFleet(ready=2), [worker(queued_tokens=90_000)] * 2, None)
    assert pressure.workers >= 3


@given(st.integers(0, 200_000), st.integers(0, 200_000), st.integers(1, 20))
def test_a_longer_queue_never_asks_for_fewer(tokens: int, more: int, ready: int) -> None:
    short = prefill_pressure(RULES, RoleFleet(ready=ready), [worker(queued_tokens=tokens)] * ready, RECENT)
    long = prefill_pressure(RULES, RoleFleet(ready=ready), [worker(queued_tokens=tokens + more)] * ready, RECENT)
    assert long.workers >= short.workers
