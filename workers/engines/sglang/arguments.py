"""Turn the worker's settings and the flags after `--` into SGLang's flags. Pure.

SGLang parses the flags itself. This module sets those that the worker decides, and refuses given ones that contradict
them. It reads those that the worker has to know: how many ranks publish events, whether this node leads.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from kvmesh.workers.config import WorkerConfig

_MODES = {Role.AGGREGATED: "null", Role.PREFILL: "prefill", Role.DECODE: "decode"}
_DEFAULT_TRANSFER = "nixl"  # SGLang's own default is mooncake

# What the worker sets, and how to change it instead.
_OWNED: Mapping[str, str] = {
    "--model-path": "set --model-path of the worker",
    "--model": "set --model-path of the worker",
    "--served-model-name": "set --model of the worker",
    "--host": "set --host of the worker",
    "--port": "SGLang's HTTP server is not started",
    "--grpc-port": "SGLang's gRPC server is not started",
    "--page-size": "set --block-size of the worker: routers count in its blocks",
    "--disaggregation-mode": "set --role of the worker",
    "--kv-events-config": "the worker wires the events itself",
    "--skip-tokenizer-init": "it is set unless --grammar-backend is given",
    "--incremental-streaming-output": "it is always set",
    "--enable-metrics": "it is always set",
    "--config": "give the flags themselves",
}


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags after `--`, as far as the worker has to understand them."""

    given: tuple[str, ...]
    dp_size: int = 1
    node_rank: int = 0
    has_tokenizer: bool = False  # needed for structured output and for min_tokens
    uses_xgrammar: bool = False  # for guides
    transfer: str = _DEFAULT_TRANSFER

    @property
    def is_leader(self) -> bool:
        """The other nodes of an engine compute for it, and only export metrics."""
        return self.node_rank == 0


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """The addresses where rank 0 publishes KV events and replays them. Rank n has ports n higher."""

    live: str
    replay: str

    def of(self, rank: int) -> tuple[str, str]:
        return _shifted(self.live, rank), _shifted(self.replay, rank)


def read_flags(config: WorkerConfig) -> Flags:
    """Raises ConfigError for what contradicts the worker's settings."""
    given = tuple(shlex.split(config.engine_args))
    names = [part.partition("=")[0] for part in given if part.startswith("--")]
    for name in names:
        _refuse_owned(name)
        if config.role is Role.AGGREGATED and name.startswith("--disaggregation-"):
            raise ConfigError(f"{name} is for prefill and decode workers", hint="set --role prefill or --role decode")
        if config.loras and name in ("--enable-lora", "--lora-paths"):
            raise ConfigError(f"{name} and --loras both name adapters", hint="leave one of them out")
    grammar = _value(given, "--grammar-backend") or "none"
    return Flags(
        given=given,
        dp_size=_number(given, ("--dp-size", "--data-parallel-size"), 1),
        node_rank=_number(given, ("--node-rank",), 0),
        has_tokenizer=grammar != "none",
        uses_xgrammar=grammar == "xgrammar",
        transfer=_value(given, "--disaggregation-transfer-backend") or _DEFAULT_TRANSFER,
    )


def argv_of(config: WorkerConfig, flags: Flags, served_name: str, endpoints: EventEndpoints) -> list[str]:
    """Return the arguments for SGLang's parser: the worker's own flags, then the given ones.

    A given flag wins, unless the worker insists on its own.
    """
    own = [
        f"--model-path={config.model_path}",
        f"--served-model-name={served_name}",
        f"--host={config.host}",
        f"--page-size={config.block_size}",
        f"--disaggregation-mode={_MODES[config.role]}",
        f"--kv-events-config={_events_config(endpoints)}",
        "--incremental-streaming-output",
        "--enable-metrics",
    ]
    if not flags.has_tokenizer:
        own.append("--skip-tokenizer-init")
    if config.role is not Role.AGGREGATED:
        own.append(f"--disaggregation-transfer-backend={flags.transfer}")
    if adapters := adapter_paths(config):
        own += ["--enable-lora", "--lora-paths", *(f"{name}={path}" for name, path in adapters.items())]
    return [*own, *flags.given]


def adapter_paths(config: WorkerConfig) -> dict[str, str]:
    """Return where the adapters of --loras are, by name. Raise ConfigError for one without a name or a path."""
    adapters: dict[str, str] = {}
    for part in config.loras.split(","):
        name, _, path = (text.strip() for text in part.partition("="))
        if not name and not path:
            continue
        if not name or not path or name in adapters:
            raise ConfigError(f"--loras has {part.strip()!r}", hint="give each as name=path, with a name of its own")
        adapters[name] = path
    return adapters


def bootstrap_host(config: WorkerConfig) -> str:
    """Return the host where decode workers reach the bootstrap server of this prefill worker. Raise ConfigError."""
    host = config.advertise_host or config.host
    if host in ("0.0.0.0", "::", "*", ""):
        raise ConfigError(
            f"decode workers cannot reach a prefill worker at {host!r}", hint="set --advertise-host to its address"
        )
    return host


def _refuse_owned(name: str) -> None:
    """Raise ConfigError for a flag of the worker, and for the beginning of one: SGLang's parser takes that too."""
    for owned, hint in _OWNED.items():
        if name == owned or (len(name) > 3 and owned.startswith(name)):
            raise ConfigError(f"{name} after -- contradicts the worker, which sets {owned}", hint=hint)


def _events_config(endpoints: EventEndpoints) -> str:
    """Return SGLang's --kv-events-config. Without `bind` SGLang connects to a plain address, where nobody listens."""
    return json.dumps(
        {
            "publisher": "zmq",
            "endpoint": endpoints.live,
            "replay_endpoint": endpoints.replay,
            "topic": "",
            "bind": True,
        }
    )


def _value(given: Sequence[str], name: str) -> str | None:
    """The last one wins, as in SGLang's parser."""
    found = None
    for i, part in enumerate(given):
        if part == name and i + 1 < len(given):
            found = given[i + 1]
        elif part.startswith(f"{name}="):
            found = part.partition("=")[2]
    return found


def _number(given: Sequence[str], names: Sequence[str], default: int) -> int:
    for name in names:
        if (text := _value(given, name)) is not None:
            if not text.isdecimal():
                raise ConfigError(f"{name} is {text!r}, a number was expected")
            return int(text)
    return default


def _shifted(endpoint: str, rank: int) -> str:
    if rank == 0:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
