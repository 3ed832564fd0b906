"""Open the mock engine."""

from functools import lru_cache
from pathlib import Path

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import read_profile
from kvmesh.protocol.tiers import Tier
from kvmesh.protocol.timing import pull_s_per_token
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import Engine
from kvmesh.workers.engines.mock.executor import MockExecutor, missing_tables
from kvmesh.workers.engines.mock.vocabulary import Vocabulary, read_vocabulary
from kvmesh.workers.engines.step import open_step_engine
from kvmesh.workers.names import adapter_names


def open_engine(config: WorkerConfig) -> Engine:
    """Raise ConfigError if the profile has no table for the worker's role."""
    return open_step_engine(config, lambda: _open_executor(config))


def _open_executor(config: WorkerConfig) -> MockExecutor:
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
        tier_s_per_token={
            Tier.HOST: pull_s_per_token(profile, config.mock_host_bandwidth_gbps, config.mock_speedup),
            Tier.DISK: pull_s_per_token(profile, config.mock_disk_bandwidth_gbps, config.mock_speedup),
            Tier.SHARED: pull_s_per_token(profile, config.mock_shared_bandwidth_gbps, config.mock_speedup),
        },
        start_s=config.mock_start_s,
        loras=adapter_names(config),
    )


@lru_cache(1)
def _vocabulary(folder: Path) -> Vocabulary:
    """Return what the folder's tokenizer knows; read once for the many workers of a process."""
    return read_vocabulary(folder)
