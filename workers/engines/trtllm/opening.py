"""Open TensorRT-LLM."""

from workers.config import WorkerConfig
from workers.engine import Engine
from workers.engines.trtllm.engine import TrtllmEngine
from workers.names import served_name


def open_engine(config: WorkerConfig) -> Engine:
    return TrtllmEngine(config, served_name(config))
