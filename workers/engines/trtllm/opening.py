"""Open TensorRT-LLM."""

from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import Engine
from kvmesh.workers.engines.trtllm.engine import TrtllmEngine
from kvmesh.workers.names import served_name


def open_engine(config: WorkerConfig) -> Engine:
    return TrtllmEngine(config, served_name(config))
