"""Open vLLM, as the worker of a mesh or as a node that computes for the worker of another node."""

from workers.config import WorkerConfig
from workers.engine import Engine
from workers.engines.vllm.arguments import leads
from workers.engines.vllm.engine import VllmEngine
from workers.engines.vllm.node import VllmNode
from workers.names import served_name


def open_engine(config: WorkerConfig) -> Engine:
    name = served_name(config)
    return VllmEngine(config, name) if leads(config) else VllmNode(config, name)
