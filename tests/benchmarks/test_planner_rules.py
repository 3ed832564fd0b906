"""Published rules of other autoscalers, as policies."""

from kvmesh.lab.bench.planner_loads import PlannerBenchConfig, loads_of
from kvmesh.lab.bench.planner_policies import Setting
from kvmesh.lab.bench.planner_rules import STABLE_S, hpa, keda, saturation_move
from kvmesh.planner.model import Observation, RoleFleet, WorkerLoad
from kvmesh.planner.sizing import Demand

DEMAND = Demand(2.0, 3000.0, 150.0)


def setting() -> Setting:
    return loads_of("step", PlannerBenchConfig())[0].setting


def seen(at_s: float, running: int, waiting: int = 0, workers: int = 4) -> Observation:
    load = WorkerLoad(name="w", running=running, waiting=waiting, kv_tokens=10, total_kv_tokens=1000)
    fleet = RoleFleet(ready=workers)
    return Observation(
        at_s=at_s, prefill=fleet, decode=fleet, prefill_loads=(load,) * workers, decode_loads=(load,) * workers
    )


def test_hpa_scales_by_the_ratio_to_its_target() -> None:
    assert hpa(setting(), DEMAND)(seen(15.0, running=1, waiting=0)).prefill == 5  # 4 * 1 / 0.8


def test_hpa_at_most_doubles_or_adds_four() -> None:
    assert hpa(setting(), DEMAND)(seen(15.0, running=40)).prefill == 8


def test_hpa_goes_down_only_after_five_quiet_minutes() -> None:
    decide = hpa(setting(), DEMAND)
    decide(seen(15.0, running=1, workers=4))
    soon = decide(seen(30.0, running=0, workers=5))
    later = decide(seen(30.0 + STABLE_S, running=0, workers=5))
    assert (soon.prefill, later.prefill) == (5, 1)


def test_keda_wants_a_worker_for_five_waiting_requests() -> None:
    assert keda(setting(), DEMAND)(seen(30.0, running=0, waiting=7)).prefill == 6  # 28 waiting


def load(kv_share: float, waiting: int) -> WorkerLoad:
    return WorkerLoad(name="w", waiting=waiting, kv_tokens=round(1000 * kv_share), total_kv_tokens=1000)


def test_the_saturation_rule_adds_one_worker_when_little_is_spare() -> None:
    assert saturation_move(RoleFleet(ready=2), [load(0.75, 0), load(0.72, 0)]) == 1
    assert saturation_move(RoleFleet(ready=2), [load(0.1, 3), load(0.1, 3)]) == 1
    assert saturation_move(RoleFleet(ready=2), [load(0.9, 9), load(0.85, 0)]) == 1


def test_the_saturation_rule_removes_a_worker_that_the_rest_can_spare() -> None:
    assert saturation_move(RoleFleet(ready=2), [load(0.3, 0), load(0.3, 0)]) == -1
    assert saturation_move(RoleFleet(ready=2), [load(0.4, 0), load(0.4, 0)]) == 0
    assert saturation_move(RoleFleet(ready=1), [load(0.1, 0)]) == 0


def test_the_saturation_rule_waits_for_workers_that_start() -> None:
    assert saturation_move(RoleFleet(ready=2, starting=1), [load(0.9, 9), load(0.9, 9)]) == 0
