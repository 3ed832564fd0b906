"""Open SGLang."""

from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import Engine
from kvmesh.workers.engines.sglang.engine import SglangEngine
from kvmesh.workers.names import served_name


def open_engine(config: WorkerConfig) -> Engine:
    return SglangEngine(config, served_name(config))
