"""Open the torch engine."""

from pathlib import Path

from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import Engine
from kvmesh.workers.engines.registry import ENGINES
from kvmesh.workers.engines.step import open_step_engine
from kvmesh.workers.engines.torch.config import bucket_sizes, read_config


def open_engine(config: WorkerConfig) -> Engine:
    """Raise ConfigError if the model's folder cannot be read or torch is not installed."""
    buckets = bucket_sizes(config.decode_buckets)
    read_config(Path(config.model_path))  # before torch is imported, because that takes seconds
    try:
        from kvmesh.workers.engines.torch.executor import TorchExecutor
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
            guide_whitespace=config.guide_whitespace,
            weights_service=config.weights_service,
            decode_buckets=buckets,
        ),
    )
