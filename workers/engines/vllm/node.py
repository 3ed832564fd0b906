"""A node that computes for the worker of another one: vLLM's processes are here, and the mesh does not hear of them."""

import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path

from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.events import Digest, KvEvent
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import NO_LAYOUT, Delta, Embedding, EmbedRequest, GenerateRequest
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import EngineInfo, EngineLoad
from kvmesh.workers.engines.external.life import EngineLife
from kvmesh.workers.engines.external.ports import free_ports
from kvmesh.workers.engines.vllm.arguments import Surroundings, plan_start
from kvmesh.workers.engines.vllm.driver import NodeProcesses, open_node
from kvmesh.workers.engines.vllm.starting import Starting

OpenNode = Callable[[Sequence[str], Mapping[str, str]], NodeProcesses]


class VllmNode:
    """Implements kvmesh.workers.engine.Engine."""

    def __init__(self, config: WorkerConfig, name: str, open_vllm: OpenNode = open_node) -> None:
        """Raises ConfigError if the settings contradict each other."""
        surroundings = Surroundings(free_ports(config.dp_size, config.host), len(os.sched_getaffinity(0)))
        self._plan = plan_start(config, name, (), surroundings)
        self._name = name
        self._model_path = str(Path(config.model_path).resolve())
        self._open_vllm = open_vllm
        self._starting: Starting[NodeProcesses] | None = None
        self._node: NodeProcesses | None = None
        self._life = EngineLife()

    async def start(self, worker_id: WorkerId, address: str) -> EngineInfo:
        self._life.begin(worker_id, address)
        self._starting = Starting(lambda: self._open_vllm(self._plan.flags, self._plan.environ))
        self._node = await self._starting.result()
        self._life.info = info = EngineInfo(
            model=self._name,
            model_path=self._model_path,
            block_size=0,  # the leader reports these
            total_blocks=0,
            context_tokens=0,
            max_num_seqs=0,
            layout=NO_LAYOUT,
            transfer="",
            serves=False,
            tells_events=False,
        )
        return info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        raise _serves_nobody()
        yield  # makes this an iterator, as the seam wants

    async def embed(self, request: EmbedRequest) -> Embedding:
        raise _serves_nobody()

    def release(self, offer_id: int, nonce: int) -> None:
        """Do nothing: this node offers nothing."""

    def on_kv_events(self, listener: Callable[[Sequence[KvEvent]], object]) -> None:
        """Do nothing: the leader has the events."""

    def kv_snapshot(self) -> list[KvEvent]:
        return []

    def kv_digest(self) -> Digest:
        return Digest(0, 0)

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0, 0, 0)

    def check_health(self) -> None:
        self._life.check()
        if self._node is not None and (failure := self._node.failure()):
            raise EngineError(f"vLLM on this node: {failure}", hint="see its log; its supervisor starts it again")

    async def stop(self) -> None:
        if not self._life.stop():
            return
        if self._starting is not None and (node := await self._starting.end()) is not None:
            await node.close()


def _serves_nobody() -> EngineError:
    return EngineError("this node computes for another", hint="send requests to the node with --node-rank 0")
