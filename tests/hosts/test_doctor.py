"""`kvmesh doctor --cluster` on four hosts: a table of all pairs, and what to do where the network is cut."""

import json
import subprocess
import sys
from typing import Any

from kvmesh.lab.hosts.mesh import HostsMesh

SERVICES = {"decode-0", "decode-1", "prefill-0", "router-0", "router-1"}


def examine(mesh: HostsMesh, *flags: str) -> tuple[int, dict[str, Any]]:
    front = mesh.lab.hosts["front"]
    command = ("ip", "netns", "exec", front.namespace, sys.executable, "-m", "kvmesh", "doctor", "--cluster", "--json")
    done = subprocess.run(
        [*command, "--discovery", mesh.discovery, *flags], capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_all_pairs_are_measured_and_kv_moves_over_tcp(mesh: HostsMesh) -> None:
    code, report = examine(mesh)
    assert (code, report["ok"], report["left_out"]) == (0, True, 0), report["problems"]
    assert {service["name"] for service in report["services"]} == SERVICES
    assert len(report["pairs"]) == 20
    assert all(pair["reachable"] and pair["round_trip_ms"] < 100 for pair in report["pairs"])
    assert all(abs(pair["clock_offset_s"]) < 0.1 for pair in report["pairs"]), "the hosts share one clock"
    pulls = [pair for pair in report["pairs"] if pair["transfer"]]
    assert {(pair["source"], pair["target"]) for pair in pulls} == {
        ("decode-0", "prefill-0"), ("decode-1", "prefill-0"),
    }  # fmt: skip
    assert all(pair["carried_by"] == "tcp" and pair["gb_per_s"] > 0.01 for pair in pulls)


def test_a_cut_pair_is_unreachable_with_advice(mesh: HostsMesh) -> None:
    mesh.lab.cut("prefill", "decode")
    code, report = examine(mesh)
    assert code == 1
    cut = {(pair["source"], pair["target"]) for pair in report["pairs"] if not pair["reachable"]}
    assert cut == {(a, b) for one in ("decode-0", "decode-1") for a, b in ((one, "prefill-0"), ("prefill-0", one))}
    advice = {problem["about"]: problem["advice"] for problem in report["problems"]}
    assert advice.keys() == {f"{source} -> {target}" for source, target in cut}
    assert advice["decode-0 -> prefill-0"].startswith("let 10.77.0.4 reach 10.77.0.3:")


def test_of_many_pairs_the_rest_is_counted(mesh: HostsMesh) -> None:
    _, report = examine(mesh, "--pairs", "6")
    assert (len(report["pairs"]), report["left_out"]) == (6, 14)
    assert any(pair["transfer"] for pair in report["pairs"]), "pairs that move KV come first"
