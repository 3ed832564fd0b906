"""Settings of the servers that run already and become workers, and the processes in front of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from kvmesh.mesh.config import to_flags
from kvmesh.mesh.discovery import DiscoveryUrl
from kvmesh.mesh.supervisor import ProcessSpec
from kvmesh.mesh.telemetry import LogLevel
from kvmesh.protocol.card_checks import MAX_NAME_CHARS
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from kvmesh.protocol.parsers import REASONING_PARSER_HELP, TOOL_PARSER_HELP
from kvmesh.workers.config import WorkerConfig

ANNOUNCED = "servers/"  # prefix of their keys in discovery; the value is a ServerEntry as JSON


class AttachConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_ATTACH_<NAME>`, that over the table [attach] of `--config`, that over the default."""

    servers: Annotated[str, Meta(description="TOML file with a table [[server]] for each; see docs/attach.md")] = ""
    discover: Annotated[bool, Meta(description="also attach servers while `kvmesh announce` publishes them")] = False
    role: Annotated[Role, Meta(description="of the servers named as words")] = Role.AGGREGATED
    kv_events: Annotated[str, Meta(description="KV events of the one server, tcp://host:port; default: ask it")] = ""
    replay: Annotated[str, Meta(description="replay socket of the same")] = ""
    model: Annotated[
        str, Meta(max_length=MAX_NAME_CHARS, description="model, as the servers call it; default: the one they have")
    ] = ""
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
    mesh_tls: Annotated[
        str, Meta(description="--mesh-tls of the workers; a frontend started here reads KVMESH_FRONTEND_MESH_TLS")
    ] = ""
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


def read_announced(name: str, value: bytes) -> ServerEntry:
    """Decode an entry of discovery. Raises ConfigError if it describes no server."""
    try:
        entry = msgspec.json.decode(value, type=ServerEntry)
    except msgspec.MsgspecError as error:
        raise ConfigError(str(error), hint="announce it by `kvmesh announce`, of this version") from error
    name_of(entry.url)
    return msgspec.structs.replace(entry, name=name)


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
        specs.append(ProcessSpec("frontend", ["-m", "kvmesh.frontend", *flags]))
    workers = [worker_config(config, entry) for entry in entries]
    return specs + [ProcessSpec(worker.name, ["-m", "kvmesh.workers", *to_flags(worker)]) for worker in workers]


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
        mesh_tls=config.mesh_tls,
        drain_timeout_s=config.drain_timeout_s,
        log_level=config.log_level,
    )
