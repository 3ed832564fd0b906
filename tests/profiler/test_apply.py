"""A deployment request: read, planned, started, watched and planned again."""

import os
import random
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import msgspec
import pytest

from kvmesh.planner.model import Action, ScalingDecision
from kvmesh.planner.record import Record
from kvmesh.planner.slo import SloState
from kvmesh.profiler.commands.apply import mesh_of, replanned, settings_of, start_command
from kvmesh.profiler.commands.plan import deployment_of, goal_of, main
from kvmesh.profiler.commands.plan_settings import PlanConfig
from kvmesh.profiler.deployment.deployment import Deployment
from kvmesh.profiler.deployment.kept import PLANS, DeploymentJudge, ProfileError, corrected_profile
from kvmesh.profiler.deployment.planner_settings import planner_toml
from kvmesh.profiler.deployment.request import DeploymentRequest, read_request
from kvmesh.profiler.files import write_profile
from kvmesh.profiler.picks import pick
from kvmesh.protocol.errors import ConfigError
from tests.support.mesh import until
from tests.support.patience import PATIENCE_S
from tests.support.planning import an_8b

REQUEST = """
slo = ["p95 TTFT <= 1 s over 30 s", "p95 ITL <= 80 ms over 30 s"]
profiles = ["{profiles}"]
engine = "mock"
gpus = 6
port = {port}
connector = "{connector}"
compose_command = "{command}"
traffic = {{rps = 4.0, isl = 384, osl = 32}}
worker = {{kv_transfer = "shm", mock_speedup = 0.15, num_blocks = 1024}}
planner = {{predictive_interval_s = 6.0, reactive_interval_s = 2.0, start_s = 3.0}}
"""


def request_file(folder: Path, connector: str = "local", command: str = "docker compose", port: int = 0) -> Path:
    """Write a request, and a profile that takes the workers for faster than `worker.mock_speedup`."""
    write_profile(an_8b(0.25, total_kv_tokens=32768), folder / "profiles" / "tp1.json")
    path = folder / "request.toml"
    path.write_text(REQUEST.format(profiles=folder / "profiles", connector=connector, command=command, port=port))
    return path


def deployed(path: Path) -> tuple[DeploymentRequest, Deployment]:
    request = read_request(path)
    config = settings_of(request, PlanConfig())
    profile = an_8b(0.25, total_kv_tokens=32768)
    picks = pick([profile], [profile], goal_of(config))
    assert picks.recommended is not None
    return request, deployment_of(config, picks.options[picks.recommended], [profile], [profile], request)


def record(at_s: float, correction: float = 1.0, *states: tuple[str, bool]) -> Record:
    decision = ScalingDecision(
        at_s=at_s, loop="predictive", action=Action.HOLD, prefill=1, decode=1, itl_correction=correction
    )
    slo = tuple(
        SloState(of=of, statement=of, share=0.5, requests=40, is_kept=kept)  # type: ignore[arg-type]
        for of, kept in states
    )
    return Record(
        ts_s=at_s, planner="p", mode="active", connector="local", observation=None, decision=decision, slo=slo
    )


def test_a_request_sets_goal_planner_and_workers(tmp_path: Path) -> None:
    request, deployment = deployed(request_file(tmp_path))
    assert (deployment.goal.ttft_slo_s, deployment.goal.itl_slo_s, deployment.goal.rps) == (1.0, 0.08, 4.0)
    up, planner = mesh_of(request, deployment, tmp_path)
    assert (planner.peak_prefill, planner.peak_decode) == (0, 0)
    assert up.up.prefill == deployment.option.prefill_workers and up.up.decode == deployment.option.decode_workers
    assert (planner.connector, planner.slo, planner.max_gpus, planner.start_s) == ("local", request.slo, 6, 3.0)
    assert planner.prefill_profile == str(tmp_path / "prefill.json")
    assert up.worker["max_num_seqs"] == deployment.option.batch < deployment.decode.max_num_seqs


def test_traffic_that_is_the_peak_becomes_the_planners_expectation(tmp_path: Path) -> None:
    path = request_file(tmp_path)
    path.write_text(path.read_text().replace("rps = 4.0", "rps = 4.0, is_peak = true"))
    request, deployment = deployed(path)
    option = deployment.option
    _, planner = mesh_of(request, deployment, tmp_path)
    assert (planner.peak_prefill, planner.peak_decode) == (option.prefill_workers, option.decode_workers)
    assert f"peak_decode = {option.decode_workers}" in planner_toml(deployment, "plan", "local")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("slo = 3", "is no request"),
        ("slo = ['p95 TTFT <= 1 s']\ntraffic = {rps = 1, isl = 9, osl = 9}", "no SLO of the ITL"),
        ("slo = ['fast', 'p95 ITL <= 1 s']\ntraffic = {rps = 1, isl = 9, osl = 9}", "no SLO: 'fast'"),
        ("slo = ['p95 ITL <= 1 s']\ntraffic = {rps = 1, isl = 9, osl = 9}\ncolour = 1", "is no request"),
    ],
)
def test_what_is_no_request_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "request.toml").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_request(tmp_path / "request.toml")
    with pytest.raises(ConfigError, match="no request at"):
        read_request(tmp_path / "none.toml")


def test_an_slo_is_told_when_it_changes() -> None:
    judge = DeploymentJudge()
    assert not judge.has_kept_all
    assert len(list(judge.hear([record(1.0, 1.0, ("ttft", True), ("itl", False))]))) == 2
    assert not judge.has_kept_all
    again = [record(1.0, 1.0, ("ttft", False)), record(2.0, 1.0, ("ttft", True), ("itl", True))]
    (line,) = judge.hear(again)
    assert line.startswith("slo: itl: kept") and judge.has_kept_all


def test_a_wrong_profile_is_told_once_and_again_when_it_gets_worse() -> None:
    judge = DeploymentJudge()
    assert list(judge.hear([record(float(n), 1.6) for n in range(1, PLANS)])) == []
    assert list(judge.hear([record(10.0, 1.1)])) == [], "three in a row must say so"
    (line,) = judge.hear([record(20.0 + n, 1.6) for n in range(9)])
    assert "steps 1.60 times" in line
    assert judge.error == ProfileError(1.0, 1.6)
    (line,) = judge.hear([record(40.0 + n, 2.0) for n in range(9)])
    assert "steps 2.00 times" in line


def test_the_new_plan_has_the_observed_times(tmp_path: Path) -> None:
    _, deployment = deployed(request_file(tmp_path))
    judge = DeploymentJudge()
    judge.error = ProfileError(1.0, 1.6)
    again = replanned(deployment, judge)
    assert again is not None
    assert again.decode.decode_s(100, 1) == pytest.approx(1.6 * deployment.decode.decode_s(100, 1))
    assert again.option.decode_workers > deployment.option.decode_workers
    assert "steps 1.60 times" in corrected_profile(deployment.decode, judge.error).notes
    judge.error = ProfileError(1.0, 100.0)
    assert replanned(deployment, judge) is None


def test_compose_is_started_with_the_written_override(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fake = tmp_path / "compose"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    path = request_file(tmp_path, "compose", str(fake))
    assert main(["--apply", str(path), "--out-dir", str(tmp_path / "plan"), "--no-png"]) == 0
    assert f"-f docker-compose.yml -f {tmp_path}/plan/compose.override.yml up --detach" in capfd.readouterr().out
    assert 'slo = ["p95 TTFT <= 1 s over 30 s"' in (tmp_path / "plan/planner.toml").read_text()
    fake.write_text("#!/bin/sh\nexit 3\n")
    assert main(["--apply", str(path), "--out-dir", str(tmp_path / "plan"), "--no-png"]) == 1


def test_kubernetes_gets_the_values_through_helm(tmp_path: Path) -> None:
    request = msgspec.structs.replace(read_request(request_file(tmp_path)), connector="kubernetes")
    command = start_command(request, tmp_path)
    assert command[:4] == ["helm", "upgrade", "--install", "kvmesh"] and command[-1] == str(tmp_path / "values.yaml")


def ask(port: int) -> None:
    body = {"model": "tiny", "prompt": [random.randrange(100, 1900) for _ in range(384)], "max_tokens": 32}
    request = Request(
        f"http://127.0.0.1:{port}/v1/completions",
        msgspec.json.encode(body | {"ignore_eos": True}),
        {"content-type": "application/json"},
    )
    with urlopen(request, timeout=60) as answer:
        answer.read()


@pytest.mark.long
def test_a_local_mesh_is_deployed_judged_and_planned_again(tmp_path: Path) -> None:
    out = tmp_path / "plan"
    command = [sys.executable, "-m", "kvmesh", "profile", "plan", "--apply", str(request_file(tmp_path))]
    log = tmp_path / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            [*command, "--out-dir", str(out), "--no-png"], stdout=written, stderr=written, env=dict(os.environ)
        )
    try:
        until(lambda: "deployed: " in log.read_text(), what="the deployment")
        port = int(log.read_text().split("deployed: ")[1].split("http://127.0.0.1:")[1].split()[0])
        with ThreadPoolExecutor(64) as asking:
            began_s = time.monotonic()
            while "planned again" not in log.read_text() and time.monotonic() - began_s < 3 * PATIENCE_S:
                asking.submit(ask, port)
                time.sleep(0.2)
        said = log.read_text()
        assert "slo: p95 ITL <= 0.08 s over 30 s: " in said
        assert "the profile proves wrong" in said and "planned again with the observed times" in said
        assert (out / "replan-1" / "decode.json").exists()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 0
