"""The planner's loop around its core: look, decide, apply, record, and nothing done on a guess."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY

from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.connectors.connector import Applied, ConnectorError, Fleets
from kvmesh.planner.core import PlannerCore
from kvmesh.planner.model import Action, Flip, Observation, Reason, RoleFleet, ScalingDecision, Traffic
from kvmesh.planner.profiles import polynomial_profile
from kvmesh.planner.record import Record, RecordFile, read_records
from kvmesh.planner.service import Planner, planned_with, serve
from kvmesh.protocol.errors import ConfigError
from tests.support.patience import PATIENCE_S


class FakeCore:
    """Decides what the test sets, and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []
        self.wants: tuple[int, int] = (1, 2)
        self.flip: Flip | None = None

    def decide(self, seen: Observation) -> ScalingDecision:
        self.seen.append(seen)
        flip, self.flip = self.flip, None  # a flip is decided once
        return ScalingDecision(
            at_s=seen.at_s, loop="reactive", action=Action.SCALE, prefill=self.wants[0], decode=self.wants[1],
            flip=flip, reasons=(Reason(code="told", text="a test says so"),),
        )  # fmt: skip


class FakeObserver:
    def __init__(self) -> None:
        self.traffic: Traffic | None = None
        self.problem = ""

    async def observe(self, at_s: float, fleets: Fleets) -> Observation:
        return Observation(at_s=at_s, prefill=fleets.prefill, decode=fleets.decode, traffic=self.traffic)


class FakeConnector:
    name = "fake"

    def __init__(self) -> None:
        self.there = Fleets(prefill=RoleFleet(ready=1), decode=RoleFleet(ready=2))
        self.applied: list[ScalingDecision] = []
        self.fails = False
        self.is_blind = False
        self.room = 100  # workers of a role that there can be

    async def fleets(self) -> Fleets:
        if self.is_blind:
            raise ConnectorError("nobody answers")
        return self.there

    async def apply(self, decision: ScalingDecision) -> Applied:
        self.applied.append(decision)
        if self.fails:
            raise ConnectorError("it broke")
        prefill, decode = min(self.room, decision.prefill), min(self.room, decision.decode)
        self.there = Fleets(prefill=RoleFleet(ready=prefill), decode=RoleFleet(ready=decode))
        flipped = 0 if decision.flip is None else decision.flip.count
        done = (prefill, decode) == (decision.prefill, decision.decode)
        return Applied(prefill=prefill, decode=decode, flipped=flipped, is_complete=done)

    async def close(self) -> None:
        pass


class Rig:
    def __init__(self, record: Path, **settings: object) -> None:
        self.core, self.observer, self.connector = FakeCore(), FakeObserver(), FakeConnector()
        self.record = record
        config = ServiceConfig(reactive_interval_s=5.0, record_file=str(record), **settings)  # type: ignore[arg-type]
        self.planner = Planner(config, self.core, self.observer, self.connector, RecordFile(record, 1 << 20), (2, 4))
        self.clock: Iterator[int] = count(0, 5)

    async def step(self) -> Record:
        await self.planner.step(float(next(self.clock)))
        return read_records(self.record, 1)[-1]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "planner.jsonl")


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"kvmesh_planner_{name}", labels) or 0.0


async def test_a_fleet_as_decided_is_left_alone_and_recorded(rig: Rig) -> None:
    record = await rig.step()
    assert rig.connector.applied == []
    assert record.applied is None
    assert [reason.code for reason in record.decision.reasons] == ["told"]


async def test_a_decision_is_applied_once(rig: Rig) -> None:
    rig.core.wants = (2, 5)
    record = await rig.step()
    assert record.applied == Applied(prefill=2, decode=5)
    await rig.step()
    assert len(rig.connector.applied) == 1


async def test_an_order_that_failed_is_given_again_with_its_flip(rig: Rig) -> None:
    rig.core.wants, rig.core.flip, rig.connector.fails = (0, 3), Flip(to_role="decode", count=1), True
    record = await rig.step()
    assert record.error == "it broke"
    assert (await rig.step()).decision.flip == Flip(to_role="decode", count=1)
    rig.connector.fails = False
    record = await rig.step()
    assert record.applied is not None
    assert record.applied.flipped == 1
    assert (await rig.step()).decision.flip is None
    assert len(rig.connector.applied) == 3


async def test_a_failed_flip_is_dropped_when_the_target_changes(rig: Rig) -> None:
    rig.core.wants, rig.core.flip, rig.connector.fails = (0, 3), Flip(to_role="decode", count=1), True
    await rig.step()
    rig.core.wants = (1, 3)
    assert (await rig.step()).decision.flip is None


async def test_an_incomplete_order_is_given_again(rig: Rig) -> None:
    rig.core.wants, rig.connector.room = (1, 6), 4
    record = await rig.step()
    assert record.applied is not None
    assert not record.applied.is_complete
    rig.connector.room = 100
    await rig.step()
    assert rig.connector.there.decode.ready == 6


async def test_a_lost_worker_is_ordered_again(rig: Rig) -> None:
    rig.connector.there = Fleets(prefill=RoleFleet(ready=1), decode=RoleFleet(ready=1))
    await rig.step()
    assert rig.connector.there.decode.ready == 2


async def test_nothing_is_decided_if_the_workers_are_unknown(rig: Rig) -> None:
    rig.core.wants = (3, 3)
    await rig.step()
    rig.connector.is_blind = True
    record = await rig.step()
    assert len(rig.core.seen) == 1
    assert len(rig.connector.applied) == 1
    assert (record.decision.action, record.decision.prefill, record.decision.decode) == (Action.HOLD, 3, 3)
    assert record.decision.reasons[0].code == "no-fleet"
    rig.connector.is_blind = False
    await rig.step()
    assert len(rig.core.seen) == 2


async def test_unknown_traffic_is_reported_with_its_reason(rig: Rig) -> None:
    rig.observer.problem = "the frontend is away"
    record = await rig.step()
    assert "the frontend is away" in record.decision.reasons[-1].text
    assert rig.core.seen[0].traffic is None


async def test_gpu_hours_count_present_workers_and_skip_unobserved_time(rig: Rig) -> None:
    before = metric("gpu_hours_total")
    rig.connector.there = Fleets(prefill=RoleFleet(ready=1), decode=RoleFleet(ready=1, draining=1))
    rig.core.wants = (1, 1)
    await rig.planner.step(0.0)
    await rig.planner.step(10.0)
    assert metric("gpu_hours_total") - before == pytest.approx((2 + 2 * 4) * 10 / 3600)
    await rig.planner.step(4000.0)
    assert metric("gpu_hours_total") - before == pytest.approx((2 + 2 * 4) * 10 / 3600)


async def test_metrics_show_the_figures_and_nan_for_unknown_ones(rig: Rig) -> None:
    rig.observer.traffic = Traffic(start_s=0.0, end_s=5.0, requests=20.0, isl_tokens=300.0)
    rig.core.wants = (2, 5)
    before = metric("decisions_total", loop="reactive", action="scale", code="told")
    await rig.step()
    assert metric("observed_requests_per_second") == 4.0
    assert metric("observed_isl_tokens") == 300.0
    unknown = REGISTRY.get_sample_value("kvmesh_planner_observed_ttft_seconds")
    assert unknown is not None
    assert unknown != unknown
    assert metric("target_replicas", role="decode") == 5
    assert metric("replicas", role="decode", state="ready") == 2
    assert metric("decisions_total", loop="reactive", action="scale", code="told") == before + 1


# --- the loop -----------------------------------------------------------------------------------------


async def running(rig: Rig, acts: Callable[[float], bool], until: Callable[[], bool]) -> None:
    stop = asyncio.Event()
    task = asyncio.create_task(rig.planner.run(stop, acts, lambda: "another"))
    async with asyncio.timeout(PATIENCE_S):
        while not until():
            await asyncio.sleep(0.001)
    stop.set()
    await task


async def test_a_planner_without_the_lease_observes_nothing(rig: Rig) -> None:
    asked = count()
    await running(rig, lambda at_s: next(asked) > 10**9, lambda: next(asked) > 3)
    assert rig.core.seen == []


async def test_with_the_lease_it_decides_at_once_until_stopped(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "planner.jsonl")
    await running(rig, lambda at_s: True, lambda: len(rig.core.seen) == 1)


async def test_a_planner_that_starts_takes_the_fleet_as_it_is(tmp_path: Path) -> None:
    """The real core: nothing is taken away before enough is known."""
    rig = Rig(tmp_path / "planner.jsonl", predictive_interval_s=10.0, max_gpus=100)
    profile = polynomial_profile(32768, 32, 512)
    config = ServiceConfig(reactive_interval_s=5.0, predictive_interval_s=10.0, max_gpus=100, record_file="")
    rig.planner._core = PlannerCore(config, profile, profile)
    rig.connector.there = Fleets(prefill=RoleFleet(ready=9), decode=RoleFleet(ready=12))
    rig.observer.traffic = Traffic(start_s=0.0, end_s=5.0, requests=1.0, isl_tokens=10.0, osl_tokens=5.0)
    for at_s in (5.0, 10.0, 15.0, 20.0):
        rig.observer.traffic = replace(rig.observer.traffic, start_s=at_s - 5, end_s=at_s)
        await rig.planner.step(at_s)
    assert rig.connector.there == Fleets(prefill=RoleFleet(ready=9), decode=RoleFleet(ready=12))


@pytest.mark.parametrize(
    ("connector", "flips"), [("local", True), ("virtual", True), ("compose", False), ("kubernetes", False)]
)
def test_flips_are_planned_only_with_connectors_that_can_flip(connector: str, flips: bool) -> None:
    assert planned_with(replace(ServiceConfig(), connector=connector)).flips is flips


async def test_settings_that_do_not_fit_are_refused_at_the_start(tmp_path: Path) -> None:
    place = f"file:{tmp_path / 'discovery'}"
    base = ServiceConfig(discovery=place, record_file="", prefill_profile="mock")
    stop = asyncio.Event()
    stop.set()
    for config, says in (
        (replace(base, prefill_profile=""), "kvmesh profile"),
        (replace(base, source="prometheus"), "--prometheus-url"),
        (replace(base, connector="local"), "--local-control"),
        (replace(base, connector="compose", compose_decode="prefill"), "--compose-prefill"),
        (
            replace(
                base, connector="kubernetes", kubernetes_url="http://x", kubernetes_namespace="n", kubernetes_decode="x"
            ),
            "<kind>",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            await serve(config, stop)


async def test_the_service_runs_and_ends(tmp_path: Path) -> None:
    record = tmp_path / "planner.jsonl"
    config = ServiceConfig(
        discovery=f"file:{tmp_path / 'discovery'}", record_file=str(record), prefill_profile="mock", shadow=True
    )
    stop = asyncio.Event()
    task = asyncio.create_task(serve(config, stop))
    async with asyncio.timeout(PATIENCE_S):
        while not (record.exists() and record.stat().st_size):
            await asyncio.sleep(0.01)
    stop.set()
    await task
    assert read_records(record, 1)[0].mode == "shadow"
