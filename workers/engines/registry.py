"""The engines that a worker can run: our own, and those of extensions, each in a folder below workers/engines.

The command line, `kvmesh doctor`, the profiler, the local cluster and `kvmesh attach` read what they know of an
engine here. The folder of an engine has a module `opening` with `open_engine(config: WorkerConfig) -> Engine`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from kvmesh.mesh.extensions import load
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Feature
from kvmesh.workers.engines.kind import SAMPLES, STEERS, EngineKind

OPTIONAL: Mapping[str, str] = {
    "dp_size": "start a worker for each rank instead",
    "count": "start a process for each worker",
    "loras": "leave it out, or choose another --engine",
    "kv_connector": "leave it out: --kv-transfer is for the other engines",
    "engine_args": "leave the flags after -- out",
}
"""Settings that only some engines read, each with what to do where another engine is chosen."""

_KINDS: tuple[EngineKind, ...] = (
    EngineKind(
        name="torch",
        title="torch",
        summary="our own, on a CPU or a CUDA GPU",
        features=(*STEERS, Feature.PROMPT_LOGPROBS, Feature.EMBEDDINGS, Feature.GUIDED),
        flips=True,
        package="torch",
        distributions=("torch",),
        install="pip install -c constraints.txt 'kvmesh[torch]'",
        is_bundled=True,
    ),
    EngineKind(
        name="mock",
        title="mock",
        summary="invents tokens, needs no model",
        features=(*SAMPLES, Feature.PROMPT_LOGPROBS, Feature.EMBEDDINGS),
        flips=True,
        takes=frozenset({"dp_size", "count", "loras"}),
        is_bundled=True,
    ),
    *load("engine"),
)

ENGINES: Mapping[str, EngineKind] = {kind.name: kind for kind in _KINDS}
STARTED = tuple(kind.name for kind in _KINDS if kind.is_started)
"""The engines that a worker starts itself."""

if TYPE_CHECKING:
    EngineName = str
    StartedEngineName = str
else:  # settings refuse other values, and --help lists them
    EngineName = Literal[tuple(ENGINES)]
    StartedEngineName = Literal[STARTED]

ENGINE_HELP = "what computes. " + "; ".join(f"{kind.name}: {kind.summary}" for kind in _KINDS)


def takers(setting: str) -> str:
    """Return the engines that read `setting`, for a message."""
    return ", ".join(kind.name for kind in _KINDS if setting in kind.takes)


def check_taken(kind: EngineKind, given: Mapping[str, bool]) -> None:
    """Raise ConfigError for a setting that is given and that the engine does not read. Keys: those of `OPTIONAL`."""
    for setting, is_given in given.items():
        if is_given and setting not in kind.takes:
            flag = "--" + setting.replace("_", "-")
            raise ConfigError(f"{flag} is for {takers(setting)}, not for --engine {kind.name}", hint=OPTIONAL[setting])
