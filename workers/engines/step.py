"""Open the step engine that torch and mock share: their executors are all that differs."""

from collections.abc import Callable
from pathlib import Path

from kvmesh.kvcache.transfer.backend import choose_backend, open_backend
from kvmesh.mesh.safeguards import is_off
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.disk_tier import GIB, DiskSettings
from kvmesh.workers.engine import Engine
from kvmesh.workers.executor import Executor
from kvmesh.workers.names import served_name
from kvmesh.workers.ranks import RankedEngine
from kvmesh.workers.shared_tier import SharedSettings
from kvmesh.workers.sleeping import SleepableEngine
from kvmesh.workers.stall import STEP_STALL_S
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from kvmesh.workers.tiers import MIB, TierSettings

NEVER_S = 1e9
HOUR_S = 3600.0


def tier_settings(config: WorkerConfig) -> TierSettings:
    """Return the tiers that a worker's settings ask for."""
    disk = None
    if config.kv_disk:
        disk = DiskSettings(config.kv_disk, int(config.kv_disk_gib * GIB), config.kv_disk_salted)
    shared = None
    if config.kv_shared:
        shared = SharedSettings(
            config.kv_shared,
            int(config.kv_shared_gib * GIB),
            config.kv_shared_hours * HOUR_S,
            config.kv_shared_salted,
            config.pull_timeout_s,
            config.kv_shared_endpoint,
        )
    return TierSettings(config.kv_host_mib * MIB, config.kv_offload, disk, shared)


def open_step_engine(config: WorkerConfig, open_executor: Callable[[], Executor]) -> Engine:
    """Return a step engine, or one for each data-parallel rank. Each gets an executor of its own."""
    step_config = StepEngineConfig(
        model=served_name(config),
        model_path=str(Path(config.model_path).resolve()),
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        offer_lease_s=NEVER_S if is_off("lease_expiry") else config.offer_lease_s,
        pull_timeout_s=config.pull_timeout_s,
        stall_timeout_s=STEP_STALL_S if config.stall_timeout_s is None else config.stall_timeout_s,
        tiers=tier_settings(config),
        shares_prefixes=config.kv_peers,
        has_weights=config.engine == "torch" and not config.random_weights,
    )

    def open_rank() -> StepEngine:
        return StepEngine(open_executor(), open_backend(choose_backend(config.kv_transfer)), step_config)

    ranks = [SleepableEngine(open_rank) for _ in range(config.dp_size)]
    return ranks[0] if config.dp_size == 1 else RankedEngine(ranks)
