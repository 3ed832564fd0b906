"""From settings to an engine. Each backend is imported only when it is asked for."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvcache.transfer.backend import TransferBackend, choose_backend, open_backend
from protocol.errors import ConfigError
from protocol.profile import read_profile
from protocol.timing import pull_s_per_token
from workers.config import WorkerConfig
from workers.engine import Engine
from workers.executor import Executor
from workers.ranks import RankedEngine
from workers.step_engine import StepEngine, StepEngineConfig

if TYPE_CHECKING:
    from workers.engines.mock.vocabulary import Vocabulary


def open_engine(config: WorkerConfig) -> Engine:
    """Raises ConfigError if the settings do not fit together or to this machine."""
    if config.dp_size > 1 and config.engine not in ("mock", "vllm"):
        raise ConfigError("--dp-size is for mock and vLLM", hint="start a worker for each rank instead")
    if config.kv_connector and config.engine != "vllm":
        raise ConfigError("--kv-connector is for vLLM", hint="leave it out: --kv-transfer is for the other engines")
    if config.engine == "attach":
        from workers.engines.attached.engine import open_attached

        return open_attached(config)
    if config.engine == "vllm":
        from workers.engines.vllm.arguments import leads
        from workers.engines.vllm.engine import VllmEngine
        from workers.engines.vllm.node import VllmNode

        return VllmEngine(config, served_name(config)) if leads(config) else VllmNode(config, served_name(config))
    if config.engine == "sglang":
        from workers.engines.sglang.engine import SglangEngine

        return SglangEngine(config, served_name(config))
    if config.engine == "trtllm":
        from workers.engines.trtllm.engine import TrtllmEngine

        return TrtllmEngine(config, served_name(config))
    if config.engine_args:
        raise ConfigError(f"--engine {config.engine} takes no flags after --", hint="leave them out")
    step_config = StepEngineConfig(
        model=served_name(config),
        model_path=str(Path(config.model_path).resolve()),
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        offer_lease_s=config.offer_lease_s,
        pull_timeout_s=config.pull_timeout_s,
    )
    if config.dp_size == 1:
        return StepEngine(_open_executor(config), _open_transfer(config), step_config)
    ranks = [StepEngine(_open_executor(config), _open_transfer(config), step_config) for _ in range(config.dp_size)]
    return RankedEngine(ranks)


def served_name(config: WorkerConfig) -> str:
    return config.model or Path(config.model_path).resolve().name


def adapter_names(config: WorkerConfig) -> tuple[str, ...]:
    """Raises ConfigError for one that is given twice, or called as the model is."""
    names = tuple(name for part in config.loras.split(",") if (name := part.strip()))
    for i, name in enumerate(names):
        if name == served_name(config) or name in names[:i]:
            raise ConfigError(f"--loras names {name!r}, which is taken", hint="give every adapter a name of its own")
    return names


def _open_executor(config: WorkerConfig) -> Executor:
    if config.engine == "mock":
        return _open_mock(config)
    if config.loras:
        raise ConfigError("the torch engine serves no adapters", hint="leave --loras out, or set --engine mock")
    try:
        from workers.engines.torch.executor import TorchExecutor
    except ImportError as error:
        raise ConfigError(
            f"the torch engine needs torch and safetensors: {error}",
            hint="pip install -c constraints.txt 'kvmesh[torch]', or set --engine mock",
        ) from error
    return TorchExecutor(
        config.model_path,
        device=config.device,
        dtype=config.dtype,
        block_size=config.block_size,
        num_threads=config.num_threads,
        random_weights=config.random_weights,
    )


def _open_mock(config: WorkerConfig) -> Executor:
    from workers.engines.mock.executor import MockExecutor, missing_tables

    profile = read_profile(Path(config.mock_profile)) if config.mock_profile else None
    if missing := missing_tables(profile, config.role):
        raise ConfigError(
            f"the profile {config.mock_profile} has no {' and no '.join(missing)} table, "
            f"a worker in the role {config.role.value} needs it",
            hint="measure it with `kvmesh profile`, or give another --mock-profile",
        )
    return MockExecutor(
        block_size=config.block_size,
        vocabulary=_vocabulary(Path(config.model_path).resolve()),
        speedup=config.mock_speedup,
        itl_ms=config.mock_itl_ms,
        profile=profile,
        pull_s_per_token=pull_s_per_token(profile, config.mock_kv_bandwidth_gbps, config.mock_speedup),
        start_s=config.mock_start_s,
        loras=adapter_names(config),
    )


@lru_cache(1)
def _vocabulary(folder: Path) -> "Vocabulary":
    """Many workers in one process have one model."""
    from workers.engines.mock.vocabulary import read_vocabulary

    return read_vocabulary(folder)


def _open_transfer(config: WorkerConfig) -> TransferBackend:
    return open_backend(choose_backend(config.kv_transfer))
