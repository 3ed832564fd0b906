"""Run a mesh on this host as processes: `kvmesh up`, the demos and the benchmarks."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from kvmesh.cluster.certificates import check_ca, issue_all
from kvmesh.cluster.config import ClusterConfig
from kvmesh.cluster.control import control_socket
from kvmesh.cluster.crew import Crew
from kvmesh.cluster.processes import (
    MEMORY,
    PLANNER,
    ca_folder,
    discovery_of,
    frontend_argv,
    planner_spec,
    process_specs,
    read_frontend,
    record_file_of,
    worker_spec,
)
from kvmesh.cluster.run_folder import PREFIX, claim, hold, let_go, remove_left_folders
from kvmesh.frontend.config import FrontendConfig
from kvmesh.mesh.config import environ_of, load_given
from kvmesh.mesh.discovery import Discovery, Put, open_discovery
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.member_session import member_session
from kvmesh.mesh.short_folder import short_folder
from kvmesh.mesh.supervisor import ProcessSpec, Supervisor
from kvmesh.planner.config import CONTROL_FILE, ServiceConfig
from kvmesh.planner.slo import with_slo
from kvmesh.protocol.errors import ConfigError, EngineError, MeshError
from kvmesh.protocol.messages import FrontendCard, Role, WorkerCard, decode
from kvmesh.router.config import RouterConfig
from kvmesh.router.rules import DEFAULT_SLO_ITL_S


def with_one_slo(
    config: ClusterConfig, planner: ServiceConfig | None, config_file: str, environ: Mapping[str, str]
) -> ClusterConfig:
    """Return the settings with the planner's SLO for the frontend, and with the frontend's for a router process.

    A value that is set wins: by a flag, in the environment or in a table of the file. An embedded router takes the
    frontend's SLO by itself. Raises ConfigError.
    """
    if planner is not None:
        planned = with_slo(planner, planner.slo, planner.aim)
        slo = {"slo_ttft_s": planned.ttft_slo_s, "slo_itl_s": planned.itl_slo_s}
        argv = frontend_argv(config, config_file)
        names = load_given(
            FrontendConfig, argv, environ, prefix="KVMESH_FRONTEND_", prog="frontend", section="frontend"
        )
        config = replace(config, frontend={name: slo[name] for name in slo if name not in names} | {**config.frontend})
    if config.up.router == "remote":
        argv = ["--config", config_file] if config_file else []
        own = {**environ, **environ_of(config.router, "KVMESH_ROUTER_")}
        names = load_given(RouterConfig, argv, own, prefix="KVMESH_ROUTER_", prog="router", section="router")
        slo_itl_s = read_frontend(config, config_file, environ).slo_itl_s
        if "slo_itl_s" not in names and slo_itl_s != DEFAULT_SLO_ITL_S:
            config = replace(config, router={**config.router, "slo_itl_s": slo_itl_s})
    return config


START_TIMEOUT_S = 180.0
HEALTH_POLL_S = 0.05


class Cluster:
    """Hold a running mesh for the process that started it."""

    def __init__(
        self,
        config: ClusterConfig,
        run_dir: Path,
        supervisor: Supervisor,
        discovery: Discovery,
        crew: Crew,
        tell: Callable[[str], None],
        frontend: FrontendConfig,
        credentials: Credentials | None = None,
    ) -> None:
        self.config = config
        self.credentials = credentials  # of an operator, where the processes talk over TLS
        self.mesh_url = ""  # of the frontend for members of the mesh, "" where it is open
        self.frontend = frontend  # as its process reads its settings
        self.run_dir = run_dir
        self.supervisor = supervisor
        self.crew = crew  # the workers, while their number changes
        self._discovery = discovery
        self._tell = tell
        self.model = config.model
        self.url = ""  # of the HTTP API, known when it is ready
        self.control = ""  # unix:<path> of its control socket
        self.planner_record = ""  # file of what its planner decides, "" if it has none
        self.cards: dict[str, WorkerCard] = {}  # by name, of the first workers

    async def until_ready(self, tell: Callable[[str], None]) -> None:
        """Wait for every process. Raises EngineError, with the end of its log, if one cannot run."""
        watching = asyncio.create_task(self._collect_cards(tell), name="wait for cards")
        failing = asyncio.create_task(self.supervisor.failed.wait(), name="wait for a failure")
        try:
            done, _ = await asyncio.wait(
                {watching, failing}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in (watching, failing):
                task.cancel()
            await asyncio.wait({watching, failing})
        if watching in done:
            watching.result()
        elif failing in done:
            assert self.supervisor.failure is not None
            raise self.supervisor.failure
        else:
            raise EngineError(f"the mesh was not ready after {START_TIMEOUT_S:.0f} s", hint=f"see {self.run_dir}/logs")

    async def _collect_cards(self, tell: Callable[[str], None]) -> None:
        expected = len(self.config.first_workers())
        async for change in self._discovery.watch(""):
            if isinstance(change, Put) and change.key.startswith("frontends/"):
                frontend = decode(change.value, FrontendCard)
                ours = await self.supervisor.settled_pid("frontend")
                if frontend.url != self.url and _is_of(ours, frontend.pid):
                    self.url, self.mesh_url = frontend.url, frontend.mesh_url
                    tell(f"frontend listens on {self.url}")
            elif isinstance(change, Put) and change.key.startswith("workers/"):
                card = decode(change.value, WorkerCard)
                if card.pid == await self.supervisor.settled_pid(card.name):
                    self.cards[card.name] = card
                    tell(f"{card.name} is ready ({card.total_blocks} KV blocks of {card.block_size} tokens)")
            if self.url and len(self.cards) == expected:
                break
        await self._until_frontend_sees(expected)
        self.crew.is_complete = True

    async def _until_frontend_sees(self, workers: int) -> None:
        """Wait until the frontend, and a router with its own process, know the workers.

        Return at once if clients need a certificate, because this process has none.
        """
        if self.frontend.tls_client_ca and self.credentials is None:
            return
        # The frontend is our own process: the certificate of its public port may be for another name.
        how: dict[str, Any] = {"ssl": False} if self.credentials is None else {}
        async with member_session(self.credentials, base_url=self.mesh_url or self.url) as http:
            while True:
                try:
                    async with http.get("/health", **how) as response:
                        health = await response.json()
                except aiohttp.ClientError:  # it has died; the supervisor starts it again
                    health = {}
                seen = health.get("workers", {}).get(self.model, {})
                if sum(seen.values()) >= workers:
                    if health["status"] == "ready":
                        return
                    if why := why_unusable(health, self.cards.values()):
                        raise ConfigError(f"no request can be answered: {why}")
                await asyncio.sleep(HEALTH_POLL_S)

    def on_planner_lost(self, failure: MeshError) -> None:
        """Continue without the planner, but fail if its settings are wrong."""
        if isinstance(failure, ConfigError):
            self.supervisor.fail(failure)
        else:
            self._tell(f"the workers stay as they are: {failure}")

    def on_memory_down(self, failure: MeshError, retry_s: float) -> bool:
        """Continue without the memory service, but not if its settings are wrong: workers load weights themselves."""
        if isinstance(failure, ConfigError):
            return False
        self._tell(f"the memory service is down, it is tried again in {retry_s:.0f} s; workers load their own weights")
        return True

    async def stop(self) -> None:
        """Stop the planner first, so that it starts no workers, then the frontend, which drains, then the others."""
        timeout_s = self.config.up.drain_timeout_s + 5
        await self.supervisor.stop([PLANNER], timeout_s)
        await self.supervisor.stop(["frontend"], timeout_s)
        await self.supervisor.stop_all(timeout_s)


def _is_of(frontend: int | None, pid: int) -> bool:
    """Return whether a card is of our frontend or one of its processes; else a killed mesh has left it."""
    try:
        return frontend is not None and frontend in (pid, psutil.Process(pid).ppid())
    except psutil.NoSuchProcess:
        return False


def why_unusable(health: Mapping[str, Any], cards: Iterable[WorkerCard]) -> str:
    """Return why the frontend ignores one of these workers, as its /health says; "" if it ignores none."""
    ours = {f"workers/{card.worker_id}" for card in cards}
    return next((found["reason"] for found in health["discovery"]["ignored"] if found["key"] in ours), "")


def make_run_dir(given: str) -> Path:
    """Make the run directory. Raises ConfigError if nothing can be written into it, or another mesh runs there."""
    try:
        run_dir = (Path(given) if given else short_folder(PREFIX, f"control/{CONTROL_FILE}")).resolve()
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run_dir / "logs").close()  # the directories may be there and closed to us
        if given:
            hold(run_dir)
        else:
            claim(run_dir)
            remove_left_folders()
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run directory {error.filename or given}: {error.strerror}",
            hint="set --run-dir to a directory that you may write to",
        ) from error
    return run_dir


def is_scaled_by(planner: ServiceConfig | None, supervisor: Supervisor) -> bool:
    """Return whether a planner runs that changes how many workers the mesh has."""
    return planner is not None and planner.connector == "local" and supervisor.pid(PLANNER) is not None


def specified(config: ClusterConfig, run_dir: Path, role: Role, name: str) -> ProcessSpec:
    return worker_spec(config, role, name, run_dir)


@asynccontextmanager
async def running_cluster(
    config: ClusterConfig, tell: Callable[[str], None], config_file: str = "", planner: ServiceConfig | None = None
) -> AsyncIterator[Cluster]:
    """Run the processes, and a planner if one is given. At the end they are stopped and their files removed.

    After a failure the logs stay, and the error's text says where they are.
    """
    config = with_one_slo(config, planner, config_file, os.environ)
    frontend = read_frontend(config, config_file, os.environ)
    check_ca(config.up.mesh_tls)
    run_dir = make_run_dir(config.up.run_dir)
    discovery = open_discovery(discovery_of(run_dir))
    supervisor = Supervisor(run_dir / "logs", tell)
    credentials = issue_all(ca_folder(config, run_dir)) if config.up.mesh_tls else None
    specify = partial(specified, config, run_dir)
    crew = Crew(supervisor, specify, config.up.drain_timeout_s, tell, credentials=credentials)
    cluster = Cluster(config, run_dir, supervisor, discovery, crew, tell, frontend, credentials)
    following = asyncio.create_task(crew.follow(discovery), name="follow workers")
    noticing, keep = asyncio.create_task(crew.notices.run(discovery), name="show notices of workers"), False
    try:
        for name, role in config.first_workers().items():
            crew.adopt(name, role)
        for spec in process_specs(config, run_dir, config_file):
            is_worker = spec.name in config.first_workers()
            on_down = partial(crew.on_down, spec.name) if is_worker else None
            supervisor.start(spec, on_down=cluster.on_memory_down if spec.name == MEMORY else on_down)
        is_planned = partial(is_scaled_by, planner, supervisor)
        async with control_socket(crew, run_dir, is_planned) as cluster.control:
            if planner is not None:
                cluster.planner_record = record_file_of(planner, run_dir)
                supervisor.start(planner_spec(config, planner, run_dir, cluster.control), cluster.on_planner_lost)
            yield cluster
    except ConfigError:  # its text is enough
        raise
    except MeshError:
        keep = True
        tell(f"something failed; the logs stay in {run_dir / 'logs'}")
        raise
    finally:
        try:
            await cluster.stop()
        finally:  # also after a second Ctrl-C, which cancels the polite stop
            following.cancel()
            noticing.cancel()
            await crew.close()
            await supervisor.kill_all()
            await discovery.close()
            let_go(run_dir, keep=keep)
