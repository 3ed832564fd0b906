"""Choose the KV connectors of vLLM that a worker uses: its --kv-transfer-config. Pure.

If several are chained, vLLM writes to all of them and reads from the first that has any KV of a prompt.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from kvmesh.workers.config import WorkerConfig

TRANSFER = "vllm-nixl"  # the name of vLLM's NIXL connector on cards and tickets

_NIXL = "NixlConnector"
_CHAIN = "MultiConnector"
_LMCACHE_SERVER = "LMCacheMPConnector"
_NAMES = {
    "nixl": _NIXL,
    "offloading": "OffloadingConnector",
    "lmcache": "LMCacheConnectorV1",
    "lmcache-mp": _LMCACHE_SERVER,
}
_NONE = "none"
_CONNECTOR_MODULE = "kvmesh.workers.engines.vllm.connector"
_LMCACHE_MODULE = "kvmesh.workers.engines.vllm.lmcache"
WEIGHTS = "kvmesh.weights"  # a key of ours among LMCache's: names the content of the weights
_KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.AGGREGATED: "kv_both"}
_KEEPS = "kv_both"  # the role of a connector that brings KV back to the same worker
_IN_HOST_MEMORY = "the KV cache is in host memory already (VLLM_CPU_KVCACHE_SPACE)"
_NOT_ON_CPUS = {
    "OffloadingConnector": f"leave it out here: {_IN_HOST_MEMORY}",
    "SimpleCPUOffloadConnector": f"leave it out here: {_IN_HOST_MEMORY}",
    "LMCacheConnectorV1": "set --kv-connector lmcache-mp, and start `lmcache server`",
}
_GIB = 1 << 30


def transfer_config(config: WorkerConfig, given: str | None, weights: str = "") -> dict[str, Any] | None:
    """Return vLLM's --kv-transfer-config, None for no connector. `given`: the user's own, which is completed.

    `weights` names the content of the model's weights, for KV that outlives this worker.
    Raise ConfigError for settings that contradict each other.
    """
    if given is None:
        found = _by_names(config)
        if found is None:
            return None
    elif config.kv_connector:
        raise ConfigError("--kv-connector and --kv-transfer-config say the same", hint="leave one of them out")
    else:
        found = _json_object(given)
    role = _KV_ROLES[config.role]
    if found.setdefault("kv_role", role) != role and config.role is not Role.AGGREGATED:
        raise ConfigError(
            f"kv_role {found['kv_role']!r} does not fit --role {config.role.value}",
            hint=f"leave kv_role out, or set it to {role}",
        )
    if not hands_over(found) and config.role is not Role.AGGREGATED:
        raise ConfigError(
            f"--role {config.role.value} hands KV over by {_NIXL}, and --kv-transfer-config has none",
            hint=f"leave it out, or make it a {_CHAIN} of which one is {_NIXL}",
        )
    for part in _parts(found):
        if part.get("kv_connector") == _NIXL:
            _complete_nixl(part, found["kv_role"], config)
        else:
            part.setdefault("kv_role", _KEEPS)
        if part.get("kv_connector") == _LMCACHE_SERVER:
            _complete_lmcache(part, config.lmcache_server, weights)
    return found


def hands_over(found: dict[str, Any]) -> bool:
    """NIXL is among the connectors: this worker can offer KV to others, or pull theirs."""
    return any(part.get("kv_connector") == _NIXL for part in _parts(found))


def keeps_kv(config: WorkerConfig) -> bool:
    """Return whether KV may outlive this worker: LMCache's server keeps it."""
    return "lmcache-mp" in config.kv_connector or _LMCACHE_SERVER in config.engine_args


def check_can_run(
    found: dict[str, Any], *, on_cpu: bool, has_module: Callable[[str], bool], has_adapters: bool = False
) -> None:
    """Raises ConfigError for a connector that vLLM would fail with here, minutes later and in another process."""
    for name in (str(part.get("kv_connector")) for part in _parts(found)):
        if on_cpu and name in _NOT_ON_CPUS:
            raise ConfigError(
                f"vLLM's {name} copies KV between a GPU and host memory, and this vLLM computes on the CPU",
                hint=_NOT_ON_CPUS[name],
            )
        if name.startswith("LMCache") and not has_module("lmcache"):
            raise ConfigError(f"vLLM's {name} needs the package lmcache", hint="pip install lmcache, or leave it out")
        if name == "LMCacheConnectorV1" and has_adapters:
            raise ConfigError(
                f"{name} keeps KV by tokens alone: an adapter would get the KV of another one",
                hint="leave --loras and --enable-lora out, or set --kv-connector lmcache-mp",
            )


# --- by name --------------------------------------------------------------------------------------------


def _by_names(config: WorkerConfig) -> dict[str, Any] | None:
    names = _chain(config)
    parts = [_part(name, config) for name in names]
    if len(parts) <= 1:
        return parts[0] if parts else None
    return {"kv_connector": _CHAIN, "kv_connector_extra_config": {"connectors": parts}}


def _chain(config: WorkerConfig) -> list[str]:
    """Raises ConfigError."""
    if not config.kv_connector:
        return [] if config.role is Role.AGGREGATED and config.kv_transfer != "nixl" else ["nixl"]
    names = [name.strip() for name in config.kv_connector.split(",")]
    for name in names:
        if name not in (*_NAMES, _NONE):
            raise ConfigError(
                f"--kv-connector has {name!r}", hint=f"it takes {', '.join(_NAMES)}, with commas between, or {_NONE}"
            )
    if len(set(names)) < len(names) or (_NONE in names and len(names) > 1):
        raise ConfigError(f"--kv-connector {config.kv_connector} contradicts itself", hint="name each connector once")
    if "nixl" not in names and (config.role is not Role.AGGREGATED or config.kv_transfer == "nixl"):
        what = "--kv-transfer nixl" if config.role is Role.AGGREGATED else f"--role {config.role.value}"
        raise ConfigError(
            f"{what} hands KV over by nixl, and --kv-connector {config.kv_connector} has none",
            hint="put nixl before the others",
        )
    if "nixl" in names[1:]:
        raise ConfigError(
            f"in --kv-connector {config.kv_connector} nixl does not come first",
            hint="what another one has of a prompt would keep vLLM from pulling the rest",
        )
    return [name for name in names if name != _NONE]


def _part(name: str, config: WorkerConfig) -> dict[str, Any]:
    part: dict[str, Any] = {"kv_connector": _NAMES[name]}
    if name == "offloading":
        part["kv_connector_extra_config"] = {"cpu_bytes_to_use": round(config.kv_offloading_gib * _GIB)}
    return part


# --- what is completed ----------------------------------------------------------------------------------


def _complete_nixl(part: dict[str, Any], role: str, config: WorkerConfig) -> None:
    part.setdefault("kv_role", role)
    part.setdefault("kv_connector_module_path", _CONNECTOR_MODULE)
    extra = part.setdefault("kv_connector_extra_config", {})
    if isinstance(extra, dict):
        extra.setdefault("kv_lease_duration", max(1, round(config.offer_lease_s)))
        extra.setdefault("num_threads", 0)  # of UCX, each would poll without a pause


def _complete_lmcache(part: dict[str, Any], server: str, weights: str) -> None:
    part.setdefault("kv_connector_module_path", _LMCACHE_MODULE)
    extra = part.setdefault("kv_connector_extra_config", {})
    if isinstance(extra, dict):
        extra.setdefault(WEIGHTS, weights)
        if "lmcache.mp.server_urls" not in extra:
            host, _, port = server.rpartition(":")
            extra.setdefault("lmcache.mp.host", f"tcp://{host}")
            extra.setdefault("lmcache.mp.port", int(port))


def _parts(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The connectors in it: itself, or those of the chain."""
    if found.get("kv_connector") != _CHAIN:
        yield found
        return
    extra = found.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, dict) else None
    yield from (part for part in (children if isinstance(children, list) else []) if isinstance(part, dict))


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--kv-transfer-config is no JSON: {error}", hint="give it as one JSON object") from error
    if not isinstance(found, dict):
        raise ConfigError("--kv-transfer-config is no JSON object", hint='such as {"kv_connector": "NixlConnector"}')
    return found
