"""A whole mesh in processes on this host: which ones, when they are ready, how they stop."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Literal

import aiohttp
import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from cluster.control import control_socket
from cluster.crew import Crew
from cluster.tiny_model import CHECKPOINT_DIR
from mesh.config import to_flags
from mesh.discovery import Discovery, Put, open_discovery
from mesh.supervisor import ProcessSpec, Supervisor
from mesh.telemetry import LogLevel
from planner.config import ServiceConfig
from planner.profiles import polynomial_profile
from protocol.errors import ConfigError, EngineError, MeshError
from protocol.messages import FrontendCard, Role, WorkerCard, decode
from protocol.profile import Profile, read_profile
from workers.config import WorkerConfig
from workers.engines.registry import ENGINES, StartedEngineName

START_TIMEOUT_S = 180.0
HEALTH_POLL_S = 0.05
PLANNER = "planner"  # name of its process


class UpConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_UP_<NAME>`, that over the TOML file of `--config`, that over the default."""

    host: Annotated[str, Meta(description="address of the HTTP API")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the HTTP API; 0: any")] = 8000
    prefill: Annotated[int, Meta(ge=0, description="prefill workers")] = 1
    decode: Annotated[int, Meta(ge=0, description="decode workers")] = 2
    aggregated: Annotated[int, Meta(ge=0, description="workers that do both halves")] = 0
    router: Annotated[Literal["embedded", "remote"], Meta(description="remote: a router process of its own")] = (
        "embedded"
    )
    model_path: Annotated[str, Meta(description="Hugging Face folder; default: the tiny model")] = str(CHECKPOINT_DIR)
    model: Annotated[str, Meta(description="name the model is served under; default: tiny, or that of its folder")] = ""
    engine: Annotated[StartedEngineName, Meta(description="what computes")] = "torch"
    engine_args: Annotated[str, Meta(description="vllm, sglang, trtllm: flags of their own, as for a shell")] = ""
    loras: Annotated[str, Meta(description="vllm, sglang: name=path, comma-separated; mock: names")] = ""
    tool_parser: Annotated[str, Meta(description="how the model writes tool calls; default: guessed")] = ""
    reasoning_parser: Annotated[str, Meta(description="how the model sets its thoughts apart; default: guessed")] = ""
    device: Annotated[str, Meta(description="torch: cpu, cuda, cuda:<n> or auto")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Meta(description="torch: auto is float32 on a CPU")
    ] = "auto"
    mock_speedup: Annotated[float, Meta(ge=0, description="mock: how much faster than modelled; 0: no delay")] = 1.0
    mock_itl_ms: Annotated[float, Meta(ge=0, description="mock: fixed time of a step that decodes; 0: as modelled")] = (
        0.0
    )
    mock_profile: Annotated[str, Meta(description="mock: file of `kvmesh profile` whose timing it keeps to")] = ""
    mock_start_s: Annotated[float, Meta(ge=0, description="mock: how long a worker takes to load")] = 0.0
    mock_kv_bandwidth_gbps: Annotated[
        float, Meta(ge=0, description="mock: GB/s at which KV moves between workers; 0: no delay")
    ] = 0.0
    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens per KV block")] = 16
    num_blocks: Annotated[int, Meta(ge=2, description="KV blocks of each worker")] = 2048
    max_num_seqs: Annotated[int, Meta(ge=1, description="sequences in one step")] = 32
    max_step_tokens: Annotated[int, Meta(ge=1, description="tokens of one step; longer prompts are chunked")] = 512
    kv_transfer: Annotated[
        Literal["auto", "nixl", "shm"], Meta(description="how KV moves between workers; auto: nixl if it loads")
    ] = "auto"
    offer_lease_s: Annotated[float, Meta(gt=0, description="a KV offer that nobody fetches is unpinned after")] = 30.0
    planner: Annotated[
        bool,
        Meta(
            description="a planner starts and stops workers; its options begin with --planner-, see python -m planner"
        ),
    ] = False
    run_dir: Annotated[str, Meta(description="for discovery and logs; default: a new one, removed at the end")] = ""
    drain_timeout_s: Annotated[float, Meta(ge=0, description="time to finish on shutdown")] = 20.0
    log_level: LogLevel = "info"


def served_name(config: UpConfig) -> str:
    if config.model:
        return config.model
    return "tiny" if Path(config.model_path) == CHECKPOINT_DIR else Path(config.model_path).resolve().name


def process_specs(config: UpConfig, run_dir: Path, config_file: str = "") -> list[ProcessSpec]:
    """The frontend first, then the workers, names as in the logs. Of `config_file` counts what is not set here:
    the tables [router] and [frontend]."""
    discovery = f"file:{run_dir / 'discovery'}"
    common = ["--discovery", discovery, "--log-level", config.log_level]
    common += ["--config", str(Path(config_file).resolve())] if config_file else []
    frontend = ["--host", config.host, "--port", str(config.port), "--router", config.router]
    frontend += ["--drain-timeout-s", str(config.drain_timeout_s)]
    specs = [ProcessSpec("frontend", ["-m", "frontend", *frontend, *common])]
    if config.router == "remote":
        specs.append(ProcessSpec("router", ["-m", "router", *common]))
    return specs + [worker_spec(config, role, name, run_dir) for name, role in first_workers(config).items()]


def first_workers(config: UpConfig) -> dict[str, Role]:
    """Those that the mesh begins with: roles by name."""
    counts = {Role.PREFILL: config.prefill, Role.DECODE: config.decode, Role.AGGREGATED: config.aggregated}
    return {f"{role.value}-{number}": role for role, count in counts.items() for number in range(count)}


def worker_spec(config: UpConfig, role: Role, name: str, run_dir: Path) -> ProcessSpec:
    worker = worker_config(config, role, name, f"file:{run_dir / 'discovery'}")
    return ProcessSpec(name, ["-m", "workers", *to_flags(worker)])


def worker_config(config: UpConfig, role: Role, name: str, discovery: str) -> WorkerConfig:
    return WorkerConfig(
        name=name,
        role=role,
        engine=config.engine,
        engine_args=config.engine_args,
        model_path=config.model_path,
        model=served_name(config),
        loras=config.loras,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        device=config.device,
        dtype=config.dtype,
        mock_speedup=config.mock_speedup,
        mock_itl_ms=config.mock_itl_ms,
        mock_profile=config.mock_profile,
        mock_start_s=config.mock_start_s,
        mock_kv_bandwidth_gbps=config.mock_kv_bandwidth_gbps,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        kv_transfer=config.kv_transfer,
        offer_lease_s=config.offer_lease_s,
        discovery=discovery,
        drain_timeout_s=config.drain_timeout_s,
        log_level=config.log_level,
    )


class Cluster:
    """A running mesh, as seen from the process that started it."""

    def __init__(
        self,
        config: UpConfig,
        run_dir: Path,
        supervisor: Supervisor,
        discovery: Discovery,
        crew: Crew,
        tell: Callable[[str], None],
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.supervisor = supervisor
        self.crew = crew  # the workers, while their number changes
        self._discovery = discovery
        self._tell = tell
        self.model = served_name(config)
        self.url = ""  # of the HTTP API, known when it is ready
        self.control = ""  # unix:<path> of its control socket
        self.planner_record = ""  # file of what its planner decides, "" if it has none
        self.cards: dict[str, WorkerCard] = {}  # by name, of those it began with

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
        config = self.config
        expected = config.prefill + config.decode + config.aggregated
        async for change in self._discovery.watch(""):
            if isinstance(change, Put) and change.key.startswith("frontends/"):
                frontend = decode(change.value, FrontendCard)
                if frontend.pid == self.supervisor.pid("frontend"):  # else it is of a mesh that was killed
                    self.url = frontend.url
                    tell(f"frontend listens on {self.url}")
            elif isinstance(change, Put) and change.key.startswith("workers/"):
                card = decode(change.value, WorkerCard)
                if card.pid == self.supervisor.pid(card.name):
                    self.cards[card.name] = card
                    tell(f"{card.name} is ready ({card.total_blocks} KV blocks of {card.block_size} tokens)")
            if self.url and len(self.cards) == expected:
                break
        await self._until_frontend_sees(expected)

    async def _until_frontend_sees(self, workers: int) -> None:
        """The cards are there; the frontend, and a router by itself, need a moment to take them in."""
        async with aiohttp.ClientSession(base_url=self.url) as http:
            while True:
                try:
                    async with http.get("/health") as response:
                        health = await response.json()
                except aiohttp.ClientError:  # it has died; the supervisor starts it anew
                    health = {}
                seen = health.get("workers", {}).get(self.model, {})
                if health.get("status") == "ready" and sum(seen.values()) >= workers:
                    return
                await asyncio.sleep(HEALTH_POLL_S)

    def on_planner_lost(self, failure: MeshError) -> None:
        """Requests are answered without one, too; but one that cannot be started as asked is a failure."""
        if isinstance(failure, ConfigError):
            self.supervisor.fail(failure)
        else:
            self._tell(f"the workers stay as they are: {failure}")

    async def stop(self) -> None:
        """The planner first, that nobody starts workers now; then the frontend: it drains while the workers work."""
        timeout_s = self.config.drain_timeout_s + 5
        await self.supervisor.stop([PLANNER], timeout_s)
        await self.supervisor.stop(["frontend"], timeout_s)
        await self.supervisor.stop_all(timeout_s)


def make_run_dir(given: str) -> Path:
    run_dir = Path(given or tempfile.mkdtemp(prefix="kvmesh-")).resolve()
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    return run_dir


def planner_spec(config: UpConfig, planner: ServiceConfig, run_dir: Path, control: str) -> ProcessSpec:
    """`planner`: as asked for. It acts on this mesh, and of mock workers it knows what they can do."""
    if config.engine == "mock" and not planner.prefill_profile:
        path = run_dir / "mock-profile.json"
        path.write_bytes(msgspec.json.encode(mock_profile(config, planner.start_s)))
        planner = replace(planner, prefill_profile=str(path))
    settings = replace(
        planner,
        flips=planner.flips and ENGINES[config.engine].flips,
        local_control=control,
        discovery=f"file:{run_dir / 'discovery'}",
        record_file=record_file_of(planner, run_dir),
        log_level=config.log_level,
    )
    return ProcessSpec(PLANNER, ["-m", "planner", *to_flags(settings)])


def record_file_of(planner: ServiceConfig, run_dir: Path) -> str:
    is_default = planner.record_file == ServiceConfig().record_file
    return str(run_dir / "planner.jsonl") if is_default else planner.record_file


def mock_profile(config: UpConfig, start_s: float) -> Profile:
    if config.mock_profile:
        return read_profile(Path(config.mock_profile))
    profile = polynomial_profile(
        config.num_blocks * config.block_size,
        config.max_num_seqs,
        config.max_step_tokens,
        config.mock_speedup or 1.0,
        config.mock_itl_ms / 1000,
    )
    return replace(profile, start_s=start_s)


@asynccontextmanager
async def running_cluster(
    config: UpConfig, tell: Callable[[str], None], config_file: str = "", planner: ServiceConfig | None = None
) -> AsyncIterator[Cluster]:
    """Start the processes; stop them and remove what they left when the block ends. With `planner` one of them is it.

    After a failure the logs stay, if the run directory is ours: its place is in the error's text.
    """
    run_dir = make_run_dir(config.run_dir)
    discovery = open_discovery(f"file:{run_dir / 'discovery'}")
    supervisor = Supervisor(run_dir / "logs", tell)
    crew = Crew(supervisor, lambda role, name: worker_spec(config, role, name, run_dir), config.drain_timeout_s, tell)
    cluster = Cluster(config, run_dir, supervisor, discovery, crew, tell)
    following = asyncio.create_task(crew.follow(discovery), name="follow workers")
    keep = False
    try:
        for name, role in first_workers(config).items():
            crew.adopt(name, role)
        for spec in process_specs(config, run_dir, config_file):
            supervisor.start(spec)
        async with control_socket(crew, run_dir) as cluster.control:
            if planner is not None:
                cluster.planner_record = record_file_of(planner, run_dir)
                supervisor.start(planner_spec(config, planner, run_dir, cluster.control), cluster.on_planner_lost)
            yield cluster
    except ConfigError:  # its text says it all
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
            await crew.close()
            await supervisor.kill_all()
            await discovery.close()
            if not config.run_dir and not keep:
                shutil.rmtree(run_dir, ignore_errors=True)
