"""Turn a worker's settings and the flags after `--` into vLLM's own flags. Pure.

The worker sets what the mesh needs: the model, its name, KV events, and how prefill and decode hand the KV over. The
rest is set by the user or by vLLM. A flag that the worker sets too is refused.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.vllm.transfer import TRANSFER, hands_over, transfer_config

_OFFLOADING = "set --kv-connector offloading, or nixl,offloading, and --kv-offloading-gib before the --"
_HOSTS = {
    "model": "set --model-path before the --",
    "model-tag": "set --model-path before the --",
    "served-model-name": "set --model before the --",
    "host": "set --host before the --; vLLM itself listens to nobody here",
    "port": "set --port before the --; vLLM itself listens to nobody here",
    "data-parallel-size": "set --dp-size before the --",
    "kv-events-config": "the worker wires KV events itself",
    "load-format": "set --random-weights before the --",
    "dtype": "set --dtype before the --",
    "kv-offloading-size": _OFFLOADING,
    "kv-offloading-backend": _OFFLOADING,
    "lora-modules": "set --loras name=path,... before the --",
}
_ALSO_HOSTS = {"load-format": "random_weights", "dtype": "dtype"}  # refused only where the worker's setting is given
_BALANCES = "the router chooses among the ranks of --dp-size; ranks with a process each: start a worker for each"
_HOSTS |= {
    f"data-parallel-{name}": _BALANCES for name in ("rank", "external-lb", "hybrid-lb", "multi-port-external-lb")
}
_ALIASES = {"-dp": "data-parallel-size", "-dpn": "data-parallel-rank", "-r": "node-rank"}
_HEADLESS = "--headless"  # vLLM's word, on its own command line, for a node that does not lead
_ANY_PORT = "tcp://*:0"
_TORCH_ONLY = {
    "block_size": "--block-size",
    "num_blocks": "--num-gpu-blocks-override",
    "max_num_seqs": "--max-num-seqs",
    "max_step_tokens": "--max-num-batched-tokens",
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in --loras."""

    name: str
    path: str
    rank: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The facts that the worker found on its machine."""

    side_channel_port: int  # the first of as many free ones as there are ranks, for NIXL's handshakes
    num_cpus: int  # that this process may use
    weights: str = ""  # names the content of the model's weights; "": not needed
    events: str = ""  # ZMQ endpoints on which a vLLM of one rank tells its KV events and replays them
    replay: str = ""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    flags: tuple[str, ...]  # for vLLM's own parser
    environ: dict[str, str]  # to be set where it is not set yet
    transfer: str  # TRANSFER, or "" where no NIXL connector is in use
    tells_events: bool


def leads(config: WorkerConfig) -> bool:
    """Return whether this node leads; if not, it computes for another one. Raises ConfigError for a bad --node-rank."""
    given = split_flags(config.engine_args)
    text, _ = _take(["--node-rank" if flag == "-r" else flag for flag in given], "node-rank")
    try:
        return int(text or "0") == 0 and _HEADLESS not in given
    except ValueError as error:
        raise ConfigError(f"--node-rank is {text!r}", hint="number the nodes from 0, which leads") from error


def plan_start(config: WorkerConfig, name: str, adapters: Sequence[Adapter], surroundings: Surroundings) -> LaunchPlan:
    """Return how to start vLLM. `name`: the model's name for clients.

    Raise ConfigError for settings that contradict each other, with what to do.
    """
    given = [flag for flag in split_flags(config.engine_args) if flag != _HEADLESS]
    names = _names(given)
    _check_torch_settings(config)
    _check_hosts_flags(config, names)
    own_transfer, given = _given_transfer_config(given)
    transfer = transfer_config(config, own_transfer, surroundings.weights)
    flags = ["--model", config.model_path, "--served-model-name", name, *given]
    if config.dtype != "auto":
        flags += ["--dtype", config.dtype]
    if config.random_weights:
        flags += ["--load-format", "dummy"]
    caches_prefixes = "no-enable-prefix-caching" not in names
    schedules = leads(config) or config.dp_size > 1  # else another node does, and tells the events
    if caches_prefixes:
        flags.append("--enable-prefix-caching")
    if caches_prefixes and schedules:
        flags += ["--kv-events-config", _events_config(config, surroundings)]
    if config.dp_size > 1:
        flags += ["--data-parallel-size", str(config.dp_size)]
    if transfer is not None:
        flags += ["--kv-transfer-config", json.dumps(transfer)]
    flags += _adapter_flags(adapters, names)
    return LaunchPlan(
        flags=tuple(flags),
        environ=_environ(config, names, surroundings),
        transfer=TRANSFER if transfer is not None and hands_over(transfer) else "",
        tells_events=caches_prefixes and schedules,
    )


def split_flags(text: str) -> list[str]:
    """Raises ConfigError for quotes that are not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--engine-args cannot be read: {error}", hint="quote it as for a shell") from error


def parse_adapters(loras: str, served_name: str) -> list[tuple[str, str]]:
    """Return (name, path) of each adapter in `name=path,...`. Raise ConfigError."""
    adapters: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in loras.split(","))):
        name, _, path = part.partition("=")
        if not name or not path:
            raise ConfigError(f"--loras has {part!r}", hint="give every adapter as name=path, with commas between")
        if name == served_name or name in adapters:
            raise ConfigError(f"--loras names {name!r}, which is taken", hint="give every adapter a name of its own")
        adapters[name] = path
    return list(adapters.items())


def _names(flags: Sequence[str]) -> dict[str, str]:
    """The flags that are given: their names as vLLM spells them, and how they were written."""
    names: dict[str, str] = {}
    for flag in flags:
        head = flag.partition("=")[0]
        if head in _ALIASES:
            names[_ALIASES[head]] = head
        elif flag.startswith("--"):
            names[head[2:].replace("_", "-").partition(".")[0]] = head
    return names


def _check_torch_settings(config: WorkerConfig) -> None:
    """Raise ConfigError for settings of the torch engine. vLLM's own defaults are better, and depend on the machine."""
    for field, flag in _TORCH_ONLY.items():
        default = WorkerConfig.__struct_defaults__[WorkerConfig.__struct_fields__.index(field) - _num_required()]
        if getattr(config, field) != default:
            mine = "--" + field.replace("_", "-")
            raise ConfigError(f"{mine} is not for vLLM", hint=f"give vLLM's own: -- {flag} {getattr(config, field)}")
    if config.device != "auto":
        raise ConfigError("--device is not for vLLM", hint="vLLM computes on what it was built for; leave it out")
    if config.kv_transfer == "shm":
        raise ConfigError("vLLM moves no KV by shm", hint="set --kv-transfer auto")


def _num_required() -> int:
    return len(WorkerConfig.__struct_fields__) - len(WorkerConfig.__struct_defaults__)


def _check_hosts_flags(config: WorkerConfig, names: Mapping[str, str]) -> None:
    for name, written in names.items():
        if name not in _HOSTS:
            continue
        setting = _ALSO_HOSTS.get(name)
        if setting is None or getattr(config, setting) not in ("auto", False):
            raise ConfigError(f"{written} stands after --, and the worker sets it itself", hint=_HOSTS[name])


# --- handing KV over ------------------------------------------------------------------------------------


def _given_transfer_config(given: list[str]) -> tuple[str | None, list[str]]:
    """The user's own --kv-transfer-config, and the flags without it."""
    text, rest = _take(given, "kv-transfer-config")
    if text is None and "kv-transfer-config" in _names(rest):
        raise ConfigError("--kv-transfer-config is given in parts", hint="give it as one JSON object")
    return text, rest


def _take(flags: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of a flag, given once as `--name value` or `--name=value`, and the rest."""
    value: str | None = None
    rest: list[str] = []
    pending = list(flags)
    while pending:
        flag = pending.pop(0)
        head, has_value, tail = flag.partition("=")
        if not head.startswith("--") or head[2:].replace("_", "-") != name:
            rest.append(flag)
            continue
        if value is not None:
            raise ConfigError(f"--{name} is given twice", hint="give it once")
        if not has_value and not pending:
            raise ConfigError(f"--{name} has no value", hint="a JSON object belongs there")
        value = tail if has_value else pending.pop(0)
    return value, rest


# --- all else -------------------------------------------------------------------------------------------


def _events_config(config: WorkerConfig, surroundings: Surroundings) -> str:
    """Return vLLM's --kv-events-config.

    vLLM binds ipc:// for one rank only, and connects to a tcp:// address without a *. With several ranks, each takes
    any free port of its node (VLLM_HOST_IP), and vLLM says afterwards which.
    """
    is_one = config.dp_size == 1
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": surroundings.events if is_one else _ANY_PORT,
        "replay_endpoint": surroundings.replay if is_one else _ANY_PORT,
    }
    return json.dumps(events)


def _adapter_flags(adapters: Sequence[Adapter], names: Mapping[str, str]) -> list[str]:
    if not adapters:
        return []
    flags = [] if "enable-lora" in names else ["--enable-lora"]
    if "max-loras" not in names:
        flags += ["--max-loras", str(len(adapters))]
    if "max-lora-rank" not in names:
        flags += ["--max-lora-rank", str(_rank_limit(max(adapter.rank for adapter in adapters)))]
    return flags


def _rank_limit(rank: int) -> int:
    """The least limit that vLLM knows and that takes `rank`."""
    limits = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    for limit in limits:
        if rank <= limit:
            return limit
    raise ConfigError(f"an adapter has rank {rank}", hint=f"vLLM takes at most {limits[-1]}")


def _environ(config: WorkerConfig, names: Mapping[str, str], surroundings: Surroundings) -> dict[str, str]:
    """Return the environment that vLLM is to have where it is not set yet.

    `nobind`: by default vLLM pins one thread to every core, and workers on one machine starve each other. Without
    torch.compile a request for logprobs would still compile a function, for many seconds.
    """
    host = config.advertise_host or config.host
    threads = config.num_threads or max(1, surroundings.num_cpus // (2 * config.dp_size))
    environ = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(surroundings.side_channel_port),
    }
    if "enforce-eager" in names:
        environ["TORCHDYNAMO_DISABLE"] = "1"
    if host not in ("0.0.0.0", "::"):
        environ["VLLM_HOST_IP"] = host
    return environ
