"""A mesh whose workers are vLLM on the CPU: its processes, and what vLLM's own counters say."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.messages import FrontendCard, Role, decode
from tests.support.mesh import Mesh, until

START_S = 240.0  # two at once take a minute and a half on two cores
BLOCK = 32  # vLLM wants multiples of it on a CPU
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
FLAGS = ("--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "1024", "--max-num-seqs", "8")
ASKED_FOR = bool(os.environ.get("KVMESH_VLLM_PYTHON")) and importlib.util.find_spec("vllm") is not None

needs_vllm = pytest.mark.skipif(not ASKED_FOR, reason="runs by `make test-vllm`, in an environment that has vLLM")


class VllmMesh(Mesh):
    """A mesh whose workers are started one by one; nobody starts them again."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path) -> None:
        super().__init__(process, run_dir)
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start_worker(
        self,
        name: str,
        role: str,
        *flags: str,
        settings: Sequence[str] = (),
        model_path: Path = CHECKPOINT_DIR,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start a worker with vLLM's own `flags` and the worker's `settings`."""
        command = ["-m", "kvmesh.workers", "--engine", "vllm", "--name", name, "--role", role, "--model", "tiny"]
        command += ["--model-path", str(model_path), "--dtype", "float32"]
        command += ["--discovery", f"file:{self.run_dir / 'discovery'}", *settings, "--", *FLAGS, *flags]
        self.started[name] = _start(self.run_dir, name, command, environ)

    def end_worker(self, name: str) -> None:
        """Stop a worker, and wait until the frontend no longer knows it."""
        _end([self.started.pop(name)])
        until(self._frontend_serves_all, what=f"the frontend to forget {name}")

    def until_ready(self, *names: str, within_s: float = START_S) -> None:
        """Wait until discovery has the workers `names` and the frontend serves their model by all known workers."""

        def all_there() -> bool:
            for name in names:
                assert self.started[name].poll() is None, f"{name} ended\n{self.logs()}"
            return self.workers().keys() >= set(names)

        until(all_there, within_s, f"the workers {names}")
        until(self._frontend_serves_all, what=f"the frontend to serve by {names}")

    def _frontend_serves_all(self) -> bool:
        """Return whether the frontend knows every worker that discovery has, and lists the model if one can answer."""
        with self.http as http:
            models = [model["id"] for model in http.get("/v1/models").json()["data"]]
        workers = self.workers()
        can_answer = any(card.role is not Role.PREFILL for card in workers.values())
        return self.workers_seen() == len(workers) and ("tiny" in models or not can_answer)

    @contextmanager
    def routed_by(self, policy: str) -> Iterator[str]:
        """The URL of one more frontend in front of the same workers, with another policy."""
        name = f"frontend-{policy}"
        flags = ["--name", name, "--port", "0", "--discovery", f"file:{self.run_dir / 'discovery'}"]
        frontend = _start(self.run_dir, name, ["-m", "kvmesh.frontend", *flags], {"KVMESH_ROUTER_POLICY": policy})
        try:
            until(lambda: f"frontends/{name}" in self.entries("frontends/"), 60.0, name)
            card = decode(self.entries("frontends/")[f"frontends/{name}"], FrontendCard)
            until(lambda: self.workers_seen(card.url) == len(self.started), 30.0, "it to see the workers")
            yield card.url
        finally:
            _end([frontend])

    def tree(self, name: str) -> list[psutil.Process]:
        """The worker and vLLM's own processes below it."""
        worker = psutil.Process(self.started[name].pid)
        return [worker, *worker.children(recursive=True)]

    def signal_all(self, name: str, number: signal.Signals) -> list[psutil.Process]:
        processes = self.tree(name)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return processes

    def prompt_tokens(self, worker: str, source: str) -> float:
        """Return vLLM's count by source: local_compute, local_cache_hit or external_kv_transfer."""
        return self.metric("vllm:prompt_tokens_by_source_total", worker, source=source)


@contextmanager
def running_vllm_mesh(run_dir: Path) -> Iterator[VllmMesh]:
    """A frontend; the test starts the workers. At the end every process is gone."""
    discovery = f"file:{run_dir / 'discovery'}"
    frontend = _start(run_dir, "frontend", ["-m", "kvmesh.frontend", "--port", "0", "--discovery", discovery])
    mesh = VllmMesh(frontend, run_dir)
    try:
        until(lambda: bool(mesh.entries("frontends/")), 60.0, "the frontend")
        mesh.find_frontend()
        yield mesh
    except BaseException:
        print(mesh.logs())
        raise
    finally:
        _end([frontend, *mesh.started.values()])


def idle_cores(processes: Sequence[psutil.Process], over_s: float = 3.0) -> float:
    """Return how many cores these processes use together while nobody asks anything."""

    def used_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    began, before = time.monotonic(), used_s()
    time.sleep(over_s)
    return (used_s() - before) / (time.monotonic() - began)


def _start(
    run_dir: Path, name: str, command: Sequence[str], environ: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    env = {**os.environ, **ENV, **(environ or {})}
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    with (run_dir / "logs" / f"{name}.log").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *command], stdout=output, stderr=output, env=env, start_new_session=True
        )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
