"""Execute docker-compose.yml: every service's own `command` and health check, as processes of this host.

Only what containers have and this host has not is replaced: names of hosts, ports and paths.
`make test-containers` runs the file as it is.
"""

import asyncio
import fnmatch
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.kvcache.transfer.backend import choose_backend
from kvmesh.kvevents.nats.command import main as nats_config
from kvmesh.mesh.config import load
from kvmesh.planner.carry_out import ApplyConfig
from kvmesh.planner.config import ServiceConfig
from kvmesh.protocol.version import RELEASE
from kvmesh.workers.config import WorkerConfig, with_engine_args
from tests.support import mesh_tls
from tests.support.etcd_server import WHY_NONE as NO_ETCD
from tests.support.nats_server import WHY_NONE as NO_NATS

ROOT = Path(__file__).parent.parent.parent
COMPOSE_FILE = ROOT / "docker-compose.yml"
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
START_TIMEOUT_S = 90.0
POLL_S = 0.25

ALL: Mapping[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
SERVICES: Mapping[str, Any] = {name: service for name, service in ALL.items() if "profiles" not in service}
ONE_SHOT = [name for name, service in SERVICES.items() if service["restart"] == "no"]
OURS = [name for name, service in SERVICES.items() if service["image"].startswith("kvmesh/") and name not in ONE_SHOT]
INSTANCES = [(name, number) for name in OURS for number in range(SERVICES[name].get("scale", 1))]
PORT_FLAGS = r"(--(?:port|http-port|metrics-port|virtual-port))"


@dataclass(slots=True)
class Host:
    """Replaces the parts that a container would have and this host has not. Nothing else is replaced."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)  # by "container:port in it"
    free: Iterator[int] = field(default_factory=lambda: free_ports())

    def port(self, container: str, port: str) -> int:
        name = f"{container}:{port}"
        if name not in self.ports:
            self.ports[name] = next(self.free)
        return self.ports[name]

    def here(self, text: str, container: str) -> str:
        """Return a word, a shell line or a value of the environment as it is on this host."""
        text = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text).replace("$$(hostname -i)", "127.0.0.1")
        text = text.replace("$$(hostname)", container).replace("$$", "$").replace("0.0.0.0", "127.0.0.1")
        text = re.sub(r"\b(etcd|nats):(\d{4})", lambda m: f"127.0.0.1:{self.port(m[1], m[2])}", text)
        text = re.sub(r"//(frontend):(\d{4})", lambda m: f"//127.0.0.1:{self.port('frontend-0', m[2])}", text)
        text = re.sub(r"127\.0\.0\.1:(2379|8222)", lambda m: f"127.0.0.1:{self.port(container, m[1])}", text)
        text = re.sub(rf"{PORT_FLAGS} (\d+)", lambda m: f"{m[1]} {self.port(container, m[2])}", text)
        for there, here in (
            ("/run/secrets", self.folder / "secrets"),
            ("/run/kvmesh", self.folder / "run"),
            ("/models/tiny", CHECKPOINT_DIR),
            ("/etc/kvmesh/profile.json", ROOT / "deploy/compose/tiny-profile.json"),
            ("/etc/nats/kvmesh.conf", self.folder / "kvmesh.conf"),
            ("/tmp/planner.jsonl", self.folder / "planner.jsonl"),
        ):
            text = text.replace(there, str(here))
        return text

    def command(self, service: str, container: str) -> list[str]:
        words: list[str] = [str(word) for word in SERVICES[service]["command"]]
        if words[:2] == ["sh", "-c"]:
            line = self.here(words[2], container)
            return ["sh", "-c", re.sub(r"\bkvmesh (?=etcd-user|router|worker)", f"{sys.executable} -m kvmesh ", line)]
        words = [self.here(word, container) for word in words]
        for place, (flag, word) in enumerate(pairwise(words), 1):
            if re.fullmatch(PORT_FLAGS, flag):
                words[place] = str(self.port(container, word))
        mine = {"kvmesh": [sys.executable, "-m", "kvmesh"]}
        return [*mine.get(words[0], words[:1]), *words[1:]]

    def health_check(self, service: str, container: str) -> list[str]:
        kind, *words = SERVICES[service]["healthcheck"]["test"]
        if kind == "CMD":
            return [*words, f"--endpoints=127.0.0.1:{self.port('etcd', '2379')}"]
        assert kind == "CMD-SHELL", f"{service}: a health check of kind {kind} is not known here"
        line = re.sub(r"healthy (\d+)", lambda m: f"{ROOT}/deploy/healthy {self.port(container, m[1])}", words[0])
        return ["/bin/sh", "-c", self.here(line, container)]

    def environment(self, service: str, container: str) -> dict[str, str]:
        given: Mapping[str, str] = SERVICES[service].get("environment", {})
        return dict(os.environ) | {name: self.here(value, container) for name, value in given.items()}

    def prepare(self) -> None:
        """Make the files that compose mounts: secrets, and the configuration of NATS with ports of this host."""
        environment = dict(os.environ) | {"KVMESH_SECRETS": str(self.folder / "secrets")}
        subprocess.run([sys.executable, ROOT / "deploy/make_secrets.py"], env=environment, check=True)
        config = (ROOT / "deploy/compose/nats.conf").read_text()
        config = config.replace("0.0.0.0:4222", f"127.0.0.1:{self.port('nats', '4222')}")
        (self.folder / "kvmesh.conf").write_text(self.here(config, "nats"))
        for name in ("etcd", "nats"):
            (self.folder / "run" / name).mkdir(parents=True, mode=0o700)


def free_ports() -> Iterator[int]:
    """Below the range from which the kernel gives ports to whoever asks for any: there none is taken meanwhile."""
    for port in random.sample(range(15_000, 30_000), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        yield port


class Running:
    """The processes of the mesh, by container."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, service: str, container: str, *more: str) -> None:
        with (self.host.folder / f"{container}.log").open("wb") as log:
            self.processes[container] = await asyncio.create_subprocess_exec(
                *self.host.command(service, container),
                *more,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=self.host.environment(service, container),
            )

    async def until_healthy(self, service: str, container: str) -> None:
        """Ask the service's own health check until it agrees."""
        environment = self.host.environment(service, container)
        while True:
            process = self.processes[container]
            assert process.returncode is None, f"{container} ended with {process.returncode}"
            command = self.host.health_check(service, container)
            check = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL, env=environment)
            if await check.wait() == 0:
                return
            await asyncio.sleep(POLL_S)  # as Docker does, only faster

    async def until_ended(self, container: str) -> int:
        return await self.processes[container].wait()


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Running]:
    """All services, in the order of `depends_on`. What still runs at the end is killed."""
    host = Host(folder)
    host.prepare()
    mesh = Running(host)
    try:
        peer = f"http://127.0.0.1:{next(host.free)}"
        peers = (f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}")
        await mesh.start("etcd", "etcd", *peers, f"--initial-cluster=default={peer}")
        await mesh.start("nats", "nats")
        for name in ("etcd", "nats"):
            await mesh.until_healthy(name, name)
        await mesh.start("etcd-user", "etcd-user")
        assert await mesh.until_ended("etcd-user") == 0
        for name, number in INSTANCES:
            await mesh.start(name, f"{name}-{number}")
        yield mesh
    finally:
        for process in mesh.processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()


async def until_known(address: str, workers: int) -> None:
    """A worker is healthy once it has joined; the frontend knows it some milliseconds later."""
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


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.skipif(bool(NO_ETCD or NO_NATS), reason=NO_ETCD or NO_NATS)
@pytest.mark.skipif(shutil.which("wget") is None, reason="the health check of NATS is wget's: apt-get install wget")
@pytest.mark.skipif(mesh_tls.IS_ON, reason="the compose file does not set --mesh-tls")
async def test_the_composed_services_serve_and_stop_cleanly(tmp_path: Path) -> None:
    try:
        async with running(tmp_path) as mesh:
            frontend = f"127.0.0.1:{mesh.host.port('frontend-0', '8000')}"
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.gather(*(mesh.until_healthy(name, f"{name}-{number}") for name, number in INSTANCES))
                await until_known(frontend, 3)
            answer = await complete(frontend, "Once upon a time there was a fox. " * 8)
            assert answer["usage"]["completion_tokens"] > 0
            assert answer["choices"][0]["text"].strip()
            trace = answer["kvmesh"]
            assert trace["prefill_worker"] == "prefill-prefill-0", trace
            assert trace["decode_worker"].startswith("decode-decode-")
            assert trace["kv_bytes_pulled"] > 0, trace
            assert trace["transfer"] == choose_backend("auto")
            ours = [f"{name}-{number}" for name, number in INSTANCES]
            for container in ours:
                mesh.processes[container].send_signal(signal.SIGTERM)
            async with asyncio.timeout(min(seconds(SERVICES[name]["stop_grace_period"]) for name in OURS)):
                codes = {container: await mesh.until_ended(container) for container in ours}
            assert codes == dict.fromkeys(ours, 0)
    except (AssertionError, TimeoutError):
        print_logs(tmp_path)
        raise


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


def print_logs(logs: Path) -> None:
    for file in sorted(logs.glob("*.log")):
        print(f"--- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-30:]))


# --- what can be read without running anything --------------------------------------------------------


@pytest.mark.parametrize("service", sorted(set(ALL) - set(ONE_SHOT)))
def test_a_service_is_restarted_and_watched(service: str) -> None:
    settings = ALL[service]
    assert settings["restart"] == "unless-stopped"
    assert settings["healthcheck"]["test"]


@pytest.mark.parametrize("service", sorted(ALL))
def test_a_container_has_no_rights_and_a_root_that_cannot_be_written(service: str) -> None:
    settings = ALL[service]
    assert settings["user"] == "10001:10001"
    assert (settings["read_only"], settings["cap_drop"]) == (True, ["ALL"])
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert not settings.keys() & {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"}
    assert not any("docker.sock" in str(volume) for volume in settings.get("volumes", []))


@pytest.mark.parametrize("service", sorted(set(SERVICES) - set(ONE_SHOT)))
def test_cores_memory_and_processes_of_a_container_are_limited(service: str) -> None:
    assert SERVICES[service].keys() >= {"cpus", "mem_limit", "pids_limit"}


@pytest.mark.parametrize("service", OURS)
def test_our_services_have_time_to_drain_and_start_after_what_they_need(service: str) -> None:
    settings = SERVICES[service]
    assert seconds(settings["stop_grace_period"]) >= 45
    assert settings["depends_on"]["etcd-user"] == {"condition": "service_completed_successfully"}
    assert settings["depends_on"]["nats"] == {"condition": "service_healthy"}


def test_health_checks_have_no_spaces_that_compose_1_would_split() -> None:
    for service in ALL.values():
        kind, *words = service.get("healthcheck", {"test": ["CMD-SHELL"]})["test"]
        assert kind == "CMD-SHELL" or not any(" " in word for word in words)


def test_no_password_stands_in_the_file() -> None:
    text = COMPOSE_FILE.read_text()
    assert re.findall(r"password=(\S+)", text) == []
    named = {name for service in ALL.values() for name in service.get("secrets", [])}
    assert named == set(yaml.safe_load(text)["secrets"])


@pytest.mark.parametrize("service", OURS)
def test_a_service_gets_the_passwords_of_its_own_users_alone(service: str) -> None:
    role = service if service in ("frontend", "router", "planner") else "worker"
    settings = SERVICES[service]
    users = {"etcd": role, **({"nats": role} if role in ("worker", "router") else {})}
    more = {"planner_token"} if role == "planner" else set()
    assert set(settings["secrets"]) == {f"{server}_{user}_password" for server, user in users.items()} | more
    assert f"user={role}&" in settings["environment"][f"KVMESH_{role.upper()}_DISCOVERY"]


def test_the_users_of_nats_are_those_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert nats_config([]) == 0
    assert (ROOT / "deploy/compose/nats.conf").read_text().endswith(capsys.readouterr().out)


def test_ports_are_open_to_this_machine_alone() -> None:
    for service in ALL.values():
        for port in service.get("ports", []):
            assert port.startswith(("127.0.0.1:", "${KVMESH_BIND:-127.0.0.1}:")), port


def test_foreign_images_are_pinned_and_ours_have_the_release() -> None:
    for name, service in ALL.items():
        image = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", service["image"])
        tag = image.rpartition(":")[2]
        assert tag == RELEASE if image.startswith("kvmesh/") else re.match(r"v?\d+\.\d+\.\d+", tag), f"{name}: {image}"
    assert set(re.findall(r"^ARG VERSION=(.*)$", DOCKERFILE, re.MULTILINE)) == {RELEASE}


def test_every_target_that_is_built_is_one_of_the_dockerfile() -> None:
    targets = {service["build"]["target"] for service in ALL.values() if "build" in service}
    assert targets <= set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))


def test_the_images_run_as_an_ordinary_user_without_compilers() -> None:
    stages = {m[1]: m[2] for m in re.finditer(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)}
    for name in ("base", "vllm"):
        assert "USER 10001:10001" in stages[name]
    for name in ("base", "control", "worker"):
        assert "apt-get" not in stages[name]


def test_bases_of_images_are_pinned_and_can_be_replaced() -> None:
    bases = re.findall(r"^ARG (\w+_IMAGE)=(\S+):(\S+)$", DOCKERFILE, re.MULTILINE)
    assert {name for name, _, _ in bases} == {"PYTHON_IMAGE", "VLLM_IMAGE"}
    assert all(re.match(r"v?\d+\.\d+\.\d+", version) for _, _, version in bases)


def test_the_image_gets_every_file_it_copies() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for words in re.findall(r"^COPY (?!--from)(?:--\S+ )?(.+) \S+$", DOCKERFILE, re.MULTILINE):
        for source in words.split():
            assert (ROOT / source).exists(), source
            places = {source, source.split("/")[0]}
            assert source == "." or any(fnmatch.fnmatch(p, one) for p in places for one in allowed), source
    packages = {init.parent.name for init in ROOT.glob("*/__init__.py")} - {
        "tests",
        "lab",
    }  # no image has the laboratory
    assert packages <= set(allowed), "a package does not get into the image"


def test_docker_compose_accepts_the_file() -> None:
    command = compose_command()
    if command is None:
        pytest.skip("docker-compose is not installed: the schema of docker-compose.yml was not checked")
    profiles = ["--profile", "vllm", "--profile", "observability"]
    result = subprocess.run(
        [*command, "-f", COMPOSE_FILE, *profiles, "config", "-q"], capture_output=True, text=True, check=False
    )
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


# --- what a planner and vLLM workers are told ---------------------------------------------------------


def test_a_planner_and_its_hands_find_their_services_without_being_told() -> None:
    for config in (ServiceConfig(), ApplyConfig()):
        assert {config.compose_prefill, config.compose_decode} <= set(SERVICES)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_vllm_workers_read_their_flags(role: str) -> None:
    [shell, flag, line] = ALL[f"vllm-{role}"]["command"]
    assert (shell, flag) == ("sh", "-c")
    line = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", line).replace("$$(hostname -i)", "10.0.0.7").replace("$$(hostname)", "c0")
    words = shlex.split(line)
    assert words[:3] == ["exec", "kvmesh", "worker"]
    config = load(WorkerConfig, with_engine_args(words[3:]), {}, prefix="KVMESH_WORKER_", prog="worker")
    assert (config.role, config.engine, config.advertise_host) == (role, "vllm", "10.0.0.7")
    assert config.engine_args == "--gpu-memory-utilization 0.9"
    assert ALL[f"vllm-{role}"]["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"
