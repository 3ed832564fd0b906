"""A worker's place in the mesh without a mesh: it remembers what was done, in order."""

from collections.abc import Callable, Sequence
from typing import Any

from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Role
from kvmesh.workers.engine import EngineInfo
from kvmesh.workers.loaded_content import KvContent
from kvmesh.workers.states import WorkerStates


class FakePlace:
    """Implements kvmesh.workers.life.Place."""

    engine_kind: str = "mock"

    def __init__(self, role: Role = Role.AGGREGATED, *publishers: Any) -> None:
        self.role = role
        self.worker_id = WorkerId("w-0")
        self.publishers: Sequence[Any] = publishers
        self.done: list[str] = []
        self.infos: list[EngineInfo] = []  # with which it has joined
        self.states = WorkerStates()
        self.content = KvContent()
        self.on_change: Callable[[], object] = lambda: None

    async def join(self, info: EngineInfo) -> None:
        if self.states.has_card:
            self.done.append(f"join as {self.states.on_card or self.role.value}")
            self.infos.append(info)

    async def leave(self) -> None:
        self.done.append("leave")

    async def change(self, role: Role, *, tells_events: bool) -> None:
        self.on_change()
        self.role = role
        self.worker_id = WorkerId(f"w-{len(self.done)}")
        self.done.append("change")
