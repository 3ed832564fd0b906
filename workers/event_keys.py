"""Admit followers to the KV events of a closed mesh: the worker's method `event_key`."""

import asyncio
from typing import Protocol

from kvmesh.kvevents.door import EventDoor
from kvmesh.mesh.plane.server import Call, Handler
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import EventKey, EventKeyRequest, decode


class KeyHolder(Protocol):
    """The part of kvmesh.workers.membership.Membership that an answer needs."""

    worker_id: WorkerId
    event_key: str


class EventKeys:
    """Answers `event_key`. Which roles may call it is in mesh/identity/rights.py."""

    def __init__(self, door: EventDoor | None, holder: KeyHolder) -> None:
        self._door = door
        self._holder = holder

    def handlers(self) -> dict[str, Handler]:
        return {"event_key": self.answer}

    async def answer(self, call: Call) -> None:
        """Admit the caller's key until the caller leaves, or the worker stops."""
        request = decode(call.body, EventKeyRequest)
        if self._door is None:
            raise InvalidRequestError("the KV events of this worker are open", hint="start it with --mesh-tls")
        with self._door.admitted(request.key):
            await call.send(EventKey(worker_id=self._holder.worker_id, key=self._holder.event_key))
            await asyncio.Event().wait()
