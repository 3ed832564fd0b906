"""The Slurm script starts a mesh on the nodes of its job, prints its URL, and leaves nothing behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.support.fake_slurm import Node, write_fake_slurm
from tests.support.guide import commands_of
from tests.support.mesh import until
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port, free_ports_in_a_row

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "kvmesh.sbatch"

HAS_TOOLS = bool(shutil.which("etcd") and shutil.which("curl"))
pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.skipif(not HAS_TOOLS, reason="no etcd or curl; apt-get install etcd-server curl"),
]


class Job:
    """The batch script of a job, on nodes that all are this machine."""

    def __init__(self, folder: Path, *nodes: str, **settings: str) -> None:
        self.folder = folder / "logs"
        slurm = write_fake_slurm(folder / "bin", {node: Node("127.0.0.1") for node in nodes})
        self.port = free_port()
        environ = os.environ | slurm | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        environ |= {"MODEL_PATH": str(CHECKPOINT_DIR), "MODEL": "tiny", "ENGINE": "mock", "PYTHON": sys.executable}
        environ |= {
            "PORT": str(self.port),
            "ETCD_PORT": str(free_ports_in_a_row(2)),
            "TMPDIR": str(folder),
            "DRAIN_S": "2",
        }
        environ |= {"FOLDER": str(self.folder), "PAUSE_S": "0.1", "READY_S": str(int(PATIENCE_S))}
        self.log = folder / "job.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", str(SCRIPT)],
                env=environ | settings,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def said(self) -> str:
        return self.log.read_text()

    def until_ready(self) -> None:
        until(lambda: (self.folder / "url").exists() or self.process.poll() is not None, PATIENCE_S, "the URL")
        assert self.process.poll() is None, self.said()

    def workers(self) -> dict[str, int]:
        with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
            found: dict[str, int] = json.load(answer)["workers"]["tiny"]
        return {role: count for role, count in found.items() if count}

    def services(self) -> dict[str, psutil.Process]:
        """Return the processes of workers, by name."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            line = " ".join(process.cmdline())
            if named := re.search(r"-m kvmesh worker --name (\S+)", line):
                found[named[1]] = process
        return found

    def stop(self) -> int:
        """End the job as Slurm does before its time limit; return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        left = psutil.Process(job.process.pid).children(recursive=True) if job.process.poll() is None else []
        job.stop()
        for process in left:
            if process.is_running():
                process.kill()


def test_a_job_serves_and_leaves_nothing_behind(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, "n1", "n2", "n3")
    jobs.append(job)
    job.until_ready()
    until(lambda: job.workers() == {"prefill": 1, "decode": 1}, PATIENCE_S, "all workers")
    assert f"ready: curl http://127.0.0.1:{job.port}/v1/models" in job.said()
    children = psutil.Process(job.process.pid).children(recursive=True)
    job.services()["decode-n3-0"].kill()
    until(lambda: "decode-n3-0 ended with code 137, try 1 of 10" in job.said(), PATIENCE_S, "the next try")
    until(lambda: job.workers() == {"prefill": 1, "decode": 1}, PATIENCE_S, "the worker that was killed")
    assert job.stop() == 0, job.said()
    assert [child for child in children if child.is_running()] == []
    assert not (job.folder / "url").exists() and not list(tmp_path.glob("kvmesh-etcd-*"))
    assert "stopped" in (job.folder / "prefill-n2-0.log").read_text().splitlines()[-1]


def test_one_node_alone_has_all_and_each_worker_its_gpus(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, "n1", PREFILL_NODES="0", WORKERS_PER_NODE="2", GPUS_PER_WORKER="4")
    jobs.append(job)
    job.until_ready()
    until(lambda: job.workers() == {"aggregated": 2}, PATIENCE_S, "both workers")
    gpus = {name: process.environ()["CUDA_VISIBLE_DEVICES"] for name, process in job.services().items()}
    assert gpus == {"aggregated-n1-0": "0,1,2,3", "aggregated-n1-1": "4,5,6,7"}
    assert job.stop() == 0, job.said()


def test_a_worker_with_bad_settings_ends_the_job_with_its_words(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, "n1", "n2", "n3", MODEL_PATH="/nowhere")
    jobs.append(job)
    assert job.process.wait(PATIENCE_S) == 1
    assert re.search(
        r"(prefill-n2|decode-n3)-0 has ended; the end of its log:\nerror: cannot read /nowhere", job.said()
    )


def test_roles_that_do_not_fit_the_nodes_are_refused(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, "n1", "n2", PREFILL_NODES="1")
    jobs.append(job)
    assert job.process.wait(PATIENCE_S) == 2
    assert "PREFILL_NODES is 1 of 1 nodes with workers: none is left to decode" in job.said()


def test_the_commands_of_the_guide_lead_to_a_first_token(tmp_path: Path) -> None:
    """They run as they stand, but for the model and its engine."""
    write_fake_slurm(tmp_path / "bin", {f"n{i}": Node("127.0.0.1") for i in range(1, 5)})
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    environ = os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHON": sys.executable}
    environ |= {"MODEL": "llama-3.1-8b", "TMPDIR": str(tmp_path), "DRAIN_S": "2", "PORT": str(free_port())}
    environ |= {"ETCD_PORT": str(free_ports_in_a_row(2))}

    def run(command: str) -> str:
        command = command.replace("/models/llama-3.1-8b", str(CHECKPOINT_DIR)).replace("ENGINE=vllm", "ENGINE=mock")
        argv = ["bash", "-c", command]
        return subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True).stdout

    submit, show_url, ask, end = commands_of("cluster.md", "Slurm")
    assert "4711" in run(submit)
    job = psutil.Process(int((tmp_path / "bin" / "pid").read_text()))
    children = []
    try:
        url = tmp_path / "kvmesh-4711" / "url"
        until(lambda: url.exists() or not job.is_running(), PATIENCE_S, "the URL")
        assert url.exists(), (tmp_path / "kvmesh-4711.log").read_text()
        children = job.children(recursive=True)
        assert run(show_url).startswith("http://127.0.0.1:")
        assert json.loads(run(ask))["choices"][0]["message"]["content"]
    finally:
        if job.is_running():
            run(end)
        psutil.wait_procs([job, *children], PATIENCE_S)
    assert not job.is_running() and not [child for child in children if child.is_running()]


def test_the_time_before_the_limit_is_enough_for_three_drains() -> None:
    """The frontend drains first, then the workers: requests in flight, then KV that others still fetch."""
    text = SCRIPT.read_text()
    [signal_s], [drain_s] = re.findall(r"--signal=B:TERM@(\d+)", text), re.findall(r"DRAIN_S:-(\d+)", text)
    assert int(signal_s) >= 3 * int(drain_s) + 30
