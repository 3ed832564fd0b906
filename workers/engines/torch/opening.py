"""Open the torch engine."""

from protocol.errors import ConfigError
from workers.config import WorkerConfig
from workers.engine import Engine
from workers.engines.registry import ENGINES
from workers.engines.step import open_step_engine


def open_engine(config: WorkerConfig) -> Engine:
    """Raise ConfigError if torch is not installed."""
    try:
        from workers.engines.torch.executor import TorchExecutor
    except ImportError as error:
        raise ConfigError(
            f"the torch engine needs torch and safetensors: {error}",
            hint=f"{ENGINES['torch'].install}, or set --engine mock",
        ) from error
    return open_step_engine(
        config,
        lambda: TorchExecutor(
            config.model_path,
            device=config.device,
            dtype=config.dtype,
            block_size=config.block_size,
            num_threads=config.num_threads,
            random_weights=config.random_weights,
        ),
    )
