"""A seed becomes a schedule of faults."""

from pathlib import Path

import pytest

from kvmesh.lab.faults.kinds import KINDS, SHARED, FaultKind
from kvmesh.lab.faults.schedule import MeshShape, counts_of, plan, read_schedule, written
from kvmesh.protocol.errors import ConfigError

SEEDS = range(1, 11)


def lasts_s(kind: FaultKind) -> float:
    return kind.takes_s + kind.settles_s


def test_the_same_seed_gives_the_same_schedule() -> None:
    assert plan(7, 120) == plan(7, 120)
    assert plan(7, 120) != plan(8, 120)


def test_ten_seeds_have_every_kind_twenty_times() -> None:
    counts: dict[str, int] = {}
    for seed in SEEDS:
        for kind, times in counts_of(plan(seed, 120).faults).items():
            counts[kind] = counts.get(kind, 0) + times
    assert counts.keys() == KINDS.keys()
    assert min(counts.values()) >= 20, counts


@pytest.mark.parametrize("seed", SEEDS)
def test_some_process_of_every_role_is_never_hit(seed: int) -> None:
    schedule = plan(seed, 120)
    for fault in schedule.faults:
        if fault.role in SHARED:
            continue
        hit = {
            other.index
            for other in schedule.faults
            if other.role == fault.role
            and other.kind != "rolling"
            and other.at_s <= fault.at_s < other.at_s + other.for_s + lasts_s(KINDS[other.kind])
        }
        assert len(hit) < schedule.mesh.count(fault.role), fault


def test_only_the_chosen_kinds_are_planned() -> None:
    schedule = plan(1, 60, kinds=["kill", "stop"])
    assert counts_of(schedule.faults).keys() == {"kill", "stop"}


def test_a_mesh_with_one_of_a_role_keeps_it() -> None:
    schedule = plan(1, 60, mesh=MeshShape(frontends=1, prefill=1))
    assert not {"frontend", "prefill"} & {fault.role for fault in schedule.faults}


def test_a_schedule_is_read_as_it_was_written(tmp_path: Path) -> None:
    schedule = plan(3, 30, mesh=MeshShape(decode=2, worker_flags=("--num-blocks", "64")))
    (tmp_path / "schedule.json").write_bytes(written(schedule))
    assert read_schedule(tmp_path / "schedule.json") == schedule


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"kill"', '"kick"', "no kind of fault 'kick'"),
        ('"index": 1', '"index": 9', "cannot hit"),
        ("{", "", "no schedule"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = written(plan(3, 60, kinds=["kill"])).decode()
    (tmp_path / "schedule.json").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=says):
        read_schedule(tmp_path / "schedule.json")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_of_two_minutes_has_every_kind_that_its_mesh_can_have(seed: int) -> None:
    found = counts_of(plan(seed, 120).faults)
    assert {kind.name for kind in KINDS.values() if seed % 2 == 1 or not kind.closed} == found.keys()
