"""Open SGLang."""

from workers.config import WorkerConfig
from workers.engine import Engine
from workers.engines.sglang.engine import SglangEngine
from workers.names import served_name


def open_engine(config: WorkerConfig) -> Engine:
    return SglangEngine(config, served_name(config))
