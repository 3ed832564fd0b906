"""Execute docker-compose.yml: every service's own `command` and health check, as processes of this host."""

import asyncio
import fnmatch
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from cluster.tiny_model import CHECKPOINT_DIR
from kvcache.transfer.backend import choose_backend

ROOT = Path(__file__).parent.parent.parent
COMPOSE_FILE = ROOT / "docker-compose.yml"
START_TIMEOUT_S = 60.0
POLL_S = 0.25

SERVICES: Mapping[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
NUM_WORKERS = sum("workers" in service["command"] for service in SERVICES.values())


@dataclass(frozen=True, slots=True)
class Host:
    """Replace the parts that a container would have and this host has not. Nothing else is replaced."""

    run_dir: Path
    ports: Mapping[str, int]  # by "service:port in the container"

    def command(self, service: str) -> list[str]:
        """The service's `command`, its host name, ports, volume and model being those of this host."""
        words: list[str] = [str(word) for word in SERVICES[service]["command"]]
        here = [sys.executable] if words[0] == "python" else [words[0]]
        for flag, word in pairwise(words):
            if flag == "--advertise-host":
                here.append("127.0.0.1")
            elif flag in ("--port", "--metrics-port"):
                here.append(str(self.ports[f"{service}:{word}"]))
            else:
                here.append(self.paths(word))
        return here

    def health_check(self, service: str) -> list[str]:
        kind, *words = SERVICES[service]["healthcheck"]["test"]
        words = [self.paths(re.sub(r"127\.0\.0\.1:(\d+)", lambda m: self.address(service, m[1]), w)) for w in words]
        match kind, words:
            case "CMD", ["python", *rest]:
                return [sys.executable, *rest]
            case "CMD-SHELL", [line]:
                return ["/bin/sh", "-c", line.replace("$$", "$")]
        raise AssertionError(f"{service}: a health check of kind {kind} is not known here")

    def address(self, service: str, port: str) -> str:
        return f"127.0.0.1:{self.ports[f'{service}:{port}']}"

    def paths(self, word: str) -> str:
        return word.replace("/run/kvmesh", str(self.run_dir)).replace("/models/tiny", str(CHECKPOINT_DIR))


def fixed_ports() -> dict[str, int]:
    """A free port of this host for each port that a command names."""
    names = [
        f"{name}:{port}"
        for name, service in SERVICES.items()
        for flag, port in pairwise(service["command"])
        if flag in ("--port", "--metrics-port")
    ]
    return dict(zip(names, free_ports(), strict=False))


def free_ports() -> Iterator[int]:
    """Below the range from which the kernel gives ports to whoever asks for any: there none is taken meanwhile."""
    for port in random.sample(range(15_000, 30_000), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        yield port


def environment(service: str) -> dict[str, str]:
    """Return this host's environment and the file's; `${NAME:-default}` becomes the default."""
    given: Mapping[str, str] = SERVICES[service].get("environment", {})
    return dict(os.environ) | {name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value) for name, value in given.items()}


@asynccontextmanager
async def running(host: Host, logs: Path) -> AsyncIterator[dict[str, asyncio.subprocess.Process]]:
    """All services at once, as `docker compose up` starts them. What still runs at the end is killed."""
    processes: dict[str, asyncio.subprocess.Process] = {}
    try:
        for service in SERVICES:
            with (logs / f"{service}.log").open("wb") as log:
                processes[service] = await asyncio.create_subprocess_exec(
                    *host.command(service), stdin=DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=environment(service)
                )
        yield processes
    finally:
        for process in processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()


async def until_healthy(host: Host, service: str, process: asyncio.subprocess.Process) -> None:
    """Ask the service's own health check until it agrees."""
    while True:
        assert process.returncode is None, f"{service} ended with {process.returncode}"
        check = await asyncio.create_subprocess_exec(*host.health_check(service), stdout=DEVNULL, stderr=DEVNULL)
        if await check.wait() == 0:
            return
        await asyncio.sleep(POLL_S)  # as Docker does, only faster


async def until_known(address: str, workers: int) -> None:
    """A worker is healthy once its card is there; the frontend has it some milliseconds later."""
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"http://{address}/health") as response:
                known = (await response.json())["workers"]
            if sum(sum(of_model.values()) for of_model in known.values()) == workers:
                return
            await asyncio.sleep(POLL_S)


async def complete(address: str, prompt: str) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "kvmesh": {"trace": True}}
    async with aiohttp.ClientSession() as http, http.post(f"http://{address}/v1/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


@pytest.mark.e2e
async def test_the_composed_services_serve_and_stop_cleanly(tmp_path: Path) -> None:
    host = Host(tmp_path / "run", fixed_ports())
    async with running(host, tmp_path) as processes:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.gather(*(until_healthy(host, service, process) for service, process in processes.items()))
                await until_known(host.address("frontend", "8000"), NUM_WORKERS)
            answer = await complete(host.address("frontend", "8000"), "Once upon a time there was a fox. " * 8)
            assert answer["usage"]["completion_tokens"] > 0
            assert answer["choices"][0]["text"].strip()
            trace = answer["kvmesh"]
            assert trace["prefill_worker"] == "prefill-0", trace
            assert trace["decode_worker"] in ("decode-0", "decode-1")
            assert trace["kv_bytes_pulled"] > 0, trace
            assert trace["transfer"] == choose_backend("auto")
            for process in processes.values():
                process.send_signal(signal.SIGTERM)
            grace_s = min(seconds(service["stop_grace_period"]) for service in SERVICES.values())
            async with asyncio.timeout(grace_s):
                codes = {service: await process.wait() for service, process in processes.items()}
            assert codes == dict.fromkeys(SERVICES, 0)
        except (AssertionError, TimeoutError):
            print_logs(tmp_path)
            raise
    assert not list((tmp_path / "run" / "discovery").iterdir()), "a service left its card behind"


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


def print_logs(logs: Path) -> None:
    for file in sorted(logs.glob("*.log")):
        print(f"--- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-30:]))


# --- what can be read without running anything --------------------------------------------------------


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_restarted_watched_and_given_time_to_drain(service: str) -> None:
    settings = SERVICES[service]
    assert settings["restart"] == "unless-stopped"
    assert settings["healthcheck"]["test"]
    assert seconds(settings["stop_grace_period"]) >= 45
    assert not settings.get("privileged")


@pytest.mark.parametrize("service", SERVICES)
def test_peers_reach_a_service_by_its_name(service: str) -> None:
    flags = dict(pairwise(SERVICES[service]["command"]))
    assert flags["--host"] == "0.0.0.0"
    if flags["-m"] == "workers":
        assert flags["--advertise-host"] == flags["--name"] == service
    assert flags["--discovery"].startswith("file:/run/kvmesh/"), "not in the shared volume"


def test_the_image_runs_as_an_ordinary_user_without_compilers() -> None:
    stages = re.split(r"^FROM ", (ROOT / "deploy" / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    assert len(stages) == 2
    assert re.search(r"^USER (?!root|0)\w+$", stages[-1], re.MULTILINE)
    assert "apt-get" not in stages[-1]


def test_the_image_gets_every_file_it_copies() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for source in re.findall(r"^COPY (?!--from)(\S+) ", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE):
        assert (ROOT / source).exists(), source
        assert source == "." or any(fnmatch.fnmatch(source.split("/")[0], one) for one in allowed), source
    packages = {init.parent.name for init in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages <= set(allowed), "a package does not get into the image"


def test_docker_compose_accepts_the_file() -> None:
    command = compose_command()
    if command is None:
        pytest.skip("docker-compose is not installed: the schema of docker-compose.yml was not checked")
    result = subprocess.run([*command, "-f", COMPOSE_FILE, "config", "-q"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def compose_command() -> list[str] | None:
    """Return `docker compose` if the plugin is installed, else docker-compose, else None."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        answer = subprocess.run([*command, "version"], capture_output=True, check=False)
        if answer.returncode == 0:
            return command
    return None
