"""Ask the workers of the mesh how they are, and pass on what operators ask of them."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from kvmesh.frontend.shapes import Strict
from kvmesh.mesh.http.errors import NotFoundError
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Control, ControlAction, ControlReply, Role, WorkerCard, WorkerStatus

STATUS_TIMEOUT_S = 3.0
CONTROL_TIMEOUT_S = 120.0  # a drain and a change of role wait for the requests in hand
AT_ONCE = 64  # workers that are asked at the same time


class CrewMember(Struct, frozen=True, kw_only=True):
    """One worker in the reply of GET /kvmesh/workers."""

    id: WorkerId
    name: str
    model: str
    role: Role
    address: str
    pid: int
    resting: str  # its state while it takes no requests, else ""
    status: WorkerStatus | None  # null: it did not answer
    problem: str  # why there is no status


class CrewList(Struct, frozen=True):
    workers: list[CrewMember]


WorkerAction = Literal[
    "drain",
    "resume",
    "set_role",
    "sleep",
    "wake",
    "start_profile",
    "stop_profile",
    "reset_prefix_cache",
    "log_level",
    "load_lora",
    "unload_lora",
    "list_loras",
]
_Text = Annotated[str, Meta(max_length=4096)]


class WorkerControl(Strict, frozen=True):
    """Say what a worker is to do."""

    action: WorkerAction
    arguments: Annotated[dict[_Text, _Text], Meta(max_length=16)] = msgspec.field(default_factory=dict)


class WorkerControlled(Struct, frozen=True):
    """Say what a worker has done."""

    detail: str
    worker: str  # its id; another one after a change of role
    loras: tuple[str, ...] = ()


class WorkerCrew:
    """See and control the workers, whoever asks for it."""

    def __init__(self, plane: PlaneClient, known: Callable[[], Iterable[WorkerCard]]) -> None:
        """Control the workers in `known`, those that rest included. Of two cards with one id, the later counts."""
        self._plane = plane
        self._known = known

    def cards(self) -> list[WorkerCard]:
        """Return the cards by name."""
        cards = {card.worker_id: card for card in self._known()}
        return sorted(cards.values(), key=lambda card: (card.model, card.role, card.name))

    def find(self, name: str) -> WorkerCard:
        """Return the worker with an id or a name. Raise NotFoundError."""
        cards = self.cards()
        found = [card for card in cards if card.worker_id == name] or [card for card in cards if card.name == name]
        if len(found) != 1:
            why = f"{len(found)} workers are called {name[:256]!r}" if found else f"there is no worker {name[:256]!r}"
            raise NotFoundError(why, hint="GET /kvmesh/workers lists them with their ids")
        return found[0]

    async def members(self) -> list[CrewMember]:
        """Return all workers, each with its own view of itself."""
        free = asyncio.Semaphore(AT_ONCE)

        async def ask(card: WorkerCard) -> CrewMember:
            async with free:
                return await self._member(card)

        return list(await asyncio.gather(*[ask(card) for card in self.cards()]))

    async def _member(self, card: WorkerCard) -> CrewMember:
        status, problem = None, ""
        try:
            reply = await self._ask(card, Control(action=ControlAction.STATUS), STATUS_TIMEOUT_S)
            status = reply.status
        except MeshError as error:
            problem = str(error)
        return CrewMember(
            id=card.worker_id,
            name=card.name,
            model=card.model,
            role=card.role,
            address=card.address,
            pid=card.pid,
            resting=card.resting,
            status=status,
            problem=problem,
        )

    async def control(self, card: WorkerCard, asked: WorkerControl) -> WorkerControlled:
        """Have a worker do something. Raise the worker's error."""
        control = Control(action=ControlAction(asked.action), arguments=asked.arguments)
        reply = await self._ask(card, control, CONTROL_TIMEOUT_S)
        return WorkerControlled(reply.detail, reply.worker_id or card.worker_id, reply.loras)

    async def _ask(self, card: WorkerCard, control: Control, timeout_s: float) -> ControlReply:
        return await self._plane.ask(card.address, "control", control, ControlReply, timeout_s)
