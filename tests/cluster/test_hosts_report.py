"""The report of a mesh on four hosts: every promise that was not kept is a problem, and the exit code says so."""

import os
import secrets
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmesh.lab.hosts import command as cluster_check
from kvmesh.lab.hosts.check import left_in_shared_memory
from kvmesh.lab.hosts.compare import transport_of
from kvmesh.lab.hosts.delay import MOST_FRAMES, HeldFrames
from kvmesh.lab.hosts.lab import why_not
from kvmesh.lab.hosts.mesh import HostsAnswer
from kvmesh.lab.hosts.report import (
    FaultResult,
    Measured,
    is_too_slow,
    judge,
    late,
    result_of,
    tried_again,
    wrong_tokens,
)
from kvmesh.protocol.errors import ConfigError

RIGHT = {1: ["a", "b", "c"]}


def answer(took_s: float = 0.1, tokens: list[str] | None = None, error: str = "", pulled: int = 100) -> HostsAnswer:
    trace = {"kv_bytes_pulled": pulled}
    return HostsAnswer(took_s=took_s, tokens=["a", "b", "c"] if tokens is None else tokens, error=error, trace=trace)


def fault(kind: str = "cut", name: str = "cut a - b", heal_s: float = 0.1, *answers: HostsAnswer) -> FaultResult:
    return result_of(name, kind, [(1, one) for one in answers or (answer(),)], RIGHT, 0.1, heal_s)


def measured(*faults: FaultResult, **changes: Any) -> Measured:
    good: dict[str, Any] = {
        "seed": 1,
        "kv_bytes_link": 101,
        "kv_bytes_pulled": 100,
        "kv_transfers": {"nixl"},
        "event_transports": {"nats", "zmq"},
        "nats_away_diverged": 1,
    }
    return Measured(**good | changes, faults=list(faults))


def test_a_mesh_that_kept_all_promises_is_ok() -> None:
    report = judge(measured(fault()))
    assert (report.ok, report.problems) == (True, [])
    assert report.event_transports == ["zmq", "nats"]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (measured(fault("cut", "x", 0.1, answer(2.2))), "silence cost 2.1 s"),
        (measured(fault("unplugged", "x", 0.1, answer(2.2))), "silence cost 2.1 s"),
        (measured(fault("reset", "x", 0.1, answer(0.5))), "a reset cost 0.4 s"),
        (measured(fault(heal_s=1.1)), "the first request after healing took 1.1 s"),
        (measured(fault("unplugged", "x", 2.1)), "with a link up again, the first request took 2.1 s"),
        (measured(late(fault(), 2.5)), "answered 2.5 s after healing"),
        (measured(fault("cut", "x", 0.1, answer(tokens=["a", "x"]))), "2 tokens differ"),
        (measured(fault("cut", "x", 0.1, answer(error="boom"))), "1 requests failed"),
        (measured(kv_bytes_pulled=0), "no KV was pulled"),
        (measured(kv_bytes_link=99), "only 99 crossed the link"),
        (measured(kv_transfers={"shm"}), "over shm, not over nixl"),
        (measured(event_transports={"zmq"}), "not over zmq and nats"),
        (measured(nats_restart_diverged=1), "stay wrong after NATS"),
        (measured(nats_away_diverged=0), "the comparison sees nothing"),
        (measured(leftovers=["process 7"]), "left behind: process 7"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_broken_promise_is_a_problem(bad: Measured, problem: str) -> None:
    report = judge(bad)
    assert not report.ok
    [found] = report.problems
    assert problem in found


def test_a_fault_that_cannot_be_made_is_named_and_no_problem() -> None:
    report = judge(measured(fault(), skipped=["packets 20 ms late: no packet sockets"]))
    assert (report.ok, report.skipped) == (True, ["packets 20 ms late: no packet sockets"])


@pytest.mark.parametrize(
    ("result", "slow"),
    [
        (fault("cut", "x", 0.9, answer(2.0)), False),
        (fault("cut", "x", 0.1, answer(2.2)), True),
        (fault("reset", "x", 0.1, answer(0.5)), True),
        (fault("delay", "x", 1.1), True),
        (fault("unplugged", "x", 1.9), False),
        (late(fault("cut", "x", 0.1, answer(9.0)), 2.1), True),
        (late(fault("reset", "x", 0.1, answer(9.0)), 0.5), False),
    ],
)
def test_what_took_longer_than_promised_is_tried_again(result: FaultResult, slow: bool) -> None:
    assert is_too_slow(result) == slow


def test_another_try_has_its_own_times_and_forgets_no_failure() -> None:
    again = tried_again(fault("cut", "x", 0.1, answer(3.0), answer(error="boom")), fault())
    assert (again.tries, again.requests, again.failed, again.worst_extra_s) == (2, 3, 1, 0.0)


def test_failures_while_etcd_restarts_are_counted_apart() -> None:
    report = judge(measured(fault("server", "etcd away", 0.1, answer(error="boom")), fault()))
    assert (report.failed, report.etcd_restart_failed) == (1, 1)


def test_a_late_fault_counts_by_what_follows_the_healing() -> None:
    """The request waited 9 s because the network was away for 9 s: that is no cost of ours."""
    report = judge(measured(late(fault("cut", "x", 0.1, answer(9.0)), 0.5)))
    assert (report.ok, report.partition_recovery_s, report.waited_s) == (True, 0.0, 0.5)


@pytest.mark.parametrize(
    ("tokens", "wrong"), [(["a", "b", "c"], 0), (["a", "x", "c"], 1), (["a"], 2), (["a", "b", "c", "d"], 1), ([], 3)]
)
def test_wrong_missing_and_extra_tokens_are_counted(tokens: list[str], wrong: int) -> None:
    assert wrong_tokens(RIGHT[1], answer(tokens=tokens)) == wrong


def test_the_report_is_one_json_object_with_the_promised_fields() -> None:
    fields = msgspec.json.decode(msgspec.json.encode(judge(measured(fault()))))
    assert fields.keys() >= {
        "hosts", "requests", "wrong_tokens", "failed", "kv_bytes_link", "kv_transfer", "event_transports",
        "reset_recovery_s", "partition_recovery_s", "heal_first_request_s", "etcd_restart_failed",
        "nats_restart_diverged", "leftovers", "seed",
    }  # fmt: skip


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in why_not()
    with pytest.raises(ConfigError, match="need root; run it as root"):
        cluster_check.main(["--json"])


def test_missing_tools_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None if tool in ("nft", "etcd") else f"/usr/bin/{tool}")
    with pytest.raises(ConfigError, match="missing: nft; apt-get install iproute2"):
        cluster_check.check_tools()
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "etcd" else f"/usr/bin/{tool}")
    with pytest.raises(ConfigError, match="missing: etcd; apt-get install etcd-server"):
        cluster_check.check_tools()


def test_frames_are_held_for_the_delay_and_keep_their_order() -> None:
    held = HeldFrames(0.02)
    held.take(b"one", 1.0)
    held.take(b"two", 1.01)
    assert (held.due(1.019), held.wait_s(1.01)) == ([], pytest.approx(0.01))
    assert held.due(1.02) == [b"one"]
    assert (held.due(1.1), held.wait_s(1.1)) == ([b"two"], None)


def test_a_full_relay_loses_frames_and_grows_no_further() -> None:
    held = HeldFrames(1.0)
    for _ in range(MOST_FRAMES + 3):
        held.take(b"x", 0.0)
    assert (held.lost, len(held.due(1.0))) == (3, MOST_FRAMES)


@pytest.mark.parametrize(
    ("kv_events", "transport"), [("tcp://10.0.0.1:5", "zmq"), ("nats://n:4222/s", "nats"), ("", "none")]
)
def test_the_transport_is_read_from_the_card(kv_events: str, transport: str) -> None:
    assert transport_of(kv_events) == transport


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_shared_memory_of_other_programs_is_not_blamed_on_the_mesh() -> None:
    before = set(os.listdir("/dev/shm"))
    names = [f"sem.mp-{secrets.token_hex(8)}", f"kvmesh-{secrets.token_hex(8)}"]
    paths = [Path("/dev/shm") / name for name in names]
    for path in paths:
        path.touch()
    try:
        assert [str(paths[n]) in left_in_shared_memory(before) for n in (0, 1)] == [False, True]
    finally:
        for path in paths:
            path.unlink()
