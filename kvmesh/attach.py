"""Run `kvmesh attach`: make running servers workers of a mesh until Ctrl-C. The servers run no code of ours."""

import asyncio
import os
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct
from rich.console import Console

from mesh.config import load, to_flags
from mesh.discovery import Discovery, DiscoveryUrl, Put, open_discovery
from mesh.lifecycle import run
from mesh.supervisor import ProcessSpec, Supervisor
from mesh.telemetry import LogLevel
from protocol.errors import ConfigError, WireError
from protocol.messages import Role, WorkerCard, decode
from protocol.parsers import REASONING_PARSER_HELP, TOOL_PARSER_HELP
from workers.config import WorkerConfig

DESCRIPTION = (
    "Put a mesh in front of servers that run already: `kvmesh attach http://host:8000 [http://...]`, or "
    "`--servers FILE`, `--discover`. Each becomes a worker; an API key of theirs goes into KVMESH_ATTACH_API_KEY."
)
ANNOUNCED = "servers/"  # prefix of their keys in discovery; the value is a ServerEntry as JSON
STOP_S = 10.0  # more than the requests in progress get
IDLE_STOP_S = 2.0


class AttachConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_ATTACH_<NAME>`, that over the table [attach] of `--config`, that over the default."""

    servers: Annotated[str, Meta(description="TOML file with a table [[server]] for each; see docs/attach.md")] = ""
    discover: Annotated[bool, Meta(description="also attach servers while `kvmesh announce` publishes them")] = False
    role: Annotated[Role, Meta(description="of the servers named as words")] = Role.AGGREGATED
    kv_events: Annotated[str, Meta(description="KV events of the one server, tcp://host:port; default: ask it")] = ""
    replay: Annotated[str, Meta(description="replay socket of the same")] = ""
    model: Annotated[str, Meta(description="model, as the servers call it; default: the one they have")] = ""
    model_path: Annotated[
        str, Meta(description="Hugging Face folder of its tokenizer; default: the server's, if it is on this host")
    ] = ""
    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens per KV block, if not reported")] = 16
    num_blocks: Annotated[int, Meta(ge=2, description="KV blocks of a server, if not reported")] = 2048
    max_num_seqs: Annotated[int, Meta(ge=1, description="sequences at once of a server, if not reported")] = 128
    frontend: Annotated[bool, Meta(description="start a frontend as well")] = False
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the frontend; 0: any")] = 8000
    advertise_host: Annotated[str, Meta(description="address that peers use; default: --host")] = ""
    discovery: DiscoveryUrl = "file:.run/discovery"
    tool_parser: Annotated[str, Meta(description=TOOL_PARSER_HELP)] = ""
    reasoning_parser: Annotated[str, Meta(description=REASONING_PARSER_HELP)] = ""
    drain_timeout_s: Annotated[float, Meta(ge=0, description="time to finish on shutdown")] = 20.0
    log_level: LogLevel = "info"


class ServerEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe one [[server]]. The flags decide the fields that are not set."""

    url: str
    name: str = ""
    role: Role | None = None
    kv_events: str = ""
    replay: str = ""
    model: str = ""
    model_path: str = ""


class _ServersFile(Struct, frozen=True, forbid_unknown_fields=True):
    server: list[ServerEntry]


def main(argv: list[str]) -> int:
    urls, flags = split_urls(argv)
    config = load(
        AttachConfig,
        flags,
        os.environ,
        prefix="KVMESH_ATTACH_",
        prog="kvmesh attach",
        description=DESCRIPTION,
        section="attach",
        foreign=("KVMESH_ATTACH_API_KEY",),
    )
    specs = process_specs(config, entries_of(config, urls))
    return run(lambda stop: attach(config, specs, stop, Console(highlight=False)))


def split_urls(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `argv` into the words before the first flag and the remaining ones."""
    at = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    return list(argv[:at]), list(argv[at:])


def entries_of(config: AttachConfig, urls: Sequence[str]) -> list[ServerEntry]:
    """Return the servers, each with a unique name. Raises ConfigError."""
    entries = [ServerEntry(url=url, role=config.role, kv_events=config.kv_events, replay=config.replay) for url in urls]
    if len(entries) > 1 and (config.kv_events or config.replay):
        raise ConfigError(
            f"--kv-events and --replay are one server's, and here are {len(entries)}",
            hint="leave them out, because vLLM reports them; or list the servers in a file: --servers",
        )
    if config.servers:
        entries += read_servers(Path(config.servers))
    if not entries and not config.discover:
        hint = "`kvmesh attach http://host:port`, --servers FILE, or --discover"
        raise ConfigError("no server to attach to", hint=hint)
    named = [msgspec.structs.replace(entry, name=entry.name or name_of(entry.url)) for entry in entries]
    names = [entry.name for entry in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{', '.join(twice)}: given twice", hint="name every server once, or give them names")
    return named


def read_servers(path: Path) -> list[ServerEntry]:
    """Raises ConfigError."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=_ServersFile).server
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="--servers takes a TOML file") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", hint='a server is [[server]], url = "http://host:port"') from error


def name_of(url: str) -> str:
    """Return `host-port` of a server's URL. Raises ConfigError if it is no URL of a server."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL: {error}", hint="write it as http://host:port") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{url!r} is no URL of a server", hint="write it as http://host:port")
    return f"{host}-{port or (443 if parts.scheme == 'https' else 80)}"


def process_specs(config: AttachConfig, entries: Sequence[ServerEntry]) -> list[ProcessSpec]:
    """Return one worker for each server, and before them the frontend if the settings ask for one."""
    specs = []
    if config.frontend:
        flags = ["--host", config.host, "--port", str(config.port), "--discovery", config.discovery]
        flags += ["--drain-timeout-s", str(config.drain_timeout_s), "--log-level", config.log_level]
        specs.append(ProcessSpec("frontend", ["-m", "frontend", *flags]))
    workers = [worker_config(config, entry) for entry in entries]
    return specs + [ProcessSpec(worker.name, ["-m", "workers", *to_flags(worker)]) for worker in workers]


def worker_config(config: AttachConfig, entry: ServerEntry) -> WorkerConfig:
    return WorkerConfig(
        name=entry.name,
        role=config.role if entry.role is None else entry.role,
        engine="attach",
        attach_url=entry.url,
        attach_kv_events=entry.kv_events,
        attach_kv_replay=entry.replay,
        model_path=entry.model_path or config.model_path,
        model=entry.model or config.model,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        host=config.host,
        advertise_host=config.advertise_host,
        discovery=config.discovery,
        drain_timeout_s=config.drain_timeout_s,
        log_level=config.log_level,
    )


async def attach(config: AttachConfig, specs: Sequence[ProcessSpec], stop: asyncio.Event, console: Console) -> None:
    """Keep the processes running until `stop`. Raises the supervisor's error if one cannot run."""

    def tell(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False)

    supervisor = Supervisor(None, tell)
    discovery = open_discovery(config.discovery)
    joined: dict[str, str] = {}
    watching = [asyncio.create_task(watch_who_joins(discovery, supervisor, joined, tell), name="watch who joins")]
    if config.discover:
        attached = Announced(config, supervisor, {spec.name for spec in specs}, tell)
        watching.append(asyncio.create_task(attached.follow(discovery), name="follow announced servers"))
    waiting = [
        asyncio.create_task(stop.wait(), name="wait for Ctrl-C"),
        asyncio.create_task(supervisor.failed.wait(), name="wait for a failure"),
    ]
    try:
        for spec in specs:
            supervisor.start(spec)
        await asyncio.wait([*watching, *waiting], return_when=asyncio.FIRST_COMPLETED)
        for task in watching:
            if task.done():
                task.result()
        if supervisor.failure is not None and not stop.is_set():
            raise supervisor.failure
        await end_all(watching)
        await stop_in_order(supervisor, set(joined.values()), config.drain_timeout_s + STOP_S)
    finally:
        await end_all([*watching, *waiting])
        await supervisor.kill_all()
        await discovery.close()


class Announced:
    """Keep a worker in front of each server that is published in discovery under `servers/<name>`."""

    def __init__(
        self, config: AttachConfig, supervisor: Supervisor, taken: Set[str], tell: Callable[[str], None]
    ) -> None:
        """Refuse the names in `taken`: other servers have them."""
        self._config = config
        self._supervisor = supervisor
        self._taken = taken
        self._tell = tell
        self._running: dict[str, ProcessSpec] = {}

    async def follow(self, discovery: Discovery) -> None:
        async for change in discovery.watch(ANNOUNCED):
            name = change.key.removeprefix(ANNOUNCED)
            try:
                spec = self._spec(name, change.value) if isinstance(change, Put) else None
            except ConfigError as error:
                self._tell(f"{change.key} is not attached: {error}")
                spec = None
            if spec != self._running.get(name):
                await self._replace(name, spec)

    def _spec(self, name: str, value: bytes) -> ProcessSpec:
        """Raises ConfigError."""
        if not name or name in self._taken:
            raise ConfigError(f"the name {name!r} is taken", hint="announce it by another --name")
        [spec] = process_specs(msgspec.structs.replace(self._config, frontend=False), [read_announced(name, value)])
        return spec

    async def _replace(self, name: str, spec: ProcessSpec | None) -> None:
        if self._running.pop(name, None) is not None:
            await self._supervisor.stop([name], self._config.drain_timeout_s + STOP_S)
            self._tell(f"{name} is attached no more")
        if spec is not None:
            self._running[name] = spec
            self._supervisor.start(spec, on_failure=lambda error: self._tell(f"{name} is not attached: {error}"))


def read_announced(name: str, value: bytes) -> ServerEntry:
    """Decode an entry of discovery. Raises ConfigError if it describes no server."""
    try:
        entry = msgspec.json.decode(value, type=ServerEntry)
    except msgspec.MsgspecError as error:
        raise ConfigError(str(error), hint="announce it by `kvmesh announce`, of this version") from error
    name_of(entry.url)
    return msgspec.structs.replace(entry, name=name)


async def end_all(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def stop_in_order(supervisor: Supervisor, joined: Set[str], timeout_s: float) -> None:
    """The frontend first: it drains while the workers still work. Who waits for a server has nothing to finish."""
    await supervisor.stop(["frontend"], timeout_s)
    await supervisor.stop([name for name in supervisor.pids() if name not in joined], IDLE_STOP_S)
    await supervisor.stop_all(timeout_s)


async def watch_who_joins(
    discovery: Discovery, supervisor: Supervisor, joined: dict[str, str], tell: Callable[[str], None]
) -> None:
    """Keep in `joined` the names of our workers in the mesh, by key, and report each that joins."""
    async for change in discovery.watch("workers/"):
        if not isinstance(change, Put):
            joined.pop(change.key, None)
            continue
        try:
            card = decode(change.value, WorkerCard)
        except WireError:  # of another version of kvmesh: not ours
            continue
        if card.pid == supervisor.pid(card.name):
            joined[change.key] = card.name
            tell(describe(card))


def describe(card: WorkerCard) -> str:
    """Describe how the mesh sees a server."""
    told = "its KV events are followed" if card.kv_events else "it sends no KV events: its cache is predicted"
    return f"{card.name} serves {card.model} ({card.role.value}, blocks of {card.block_size} tokens); {told}"
