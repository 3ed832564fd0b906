"""Open vLLM, as the worker of a mesh or as a node that computes for the worker of another node."""

from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import Engine
from kvmesh.workers.engines.vllm.arguments import leads
from kvmesh.workers.engines.vllm.engine import VllmEngine
from kvmesh.workers.engines.vllm.node import VllmNode
from kvmesh.workers.names import served_name


def open_engine(config: WorkerConfig) -> Engine:
    name = served_name(config)
    return VllmEngine(config, name) if leads(config) else VllmNode(config, name)
