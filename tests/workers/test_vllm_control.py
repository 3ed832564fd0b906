"""An operator's call reaches the engine that can do it, and the mesh hears what changed by it."""

from typing import Any, cast

import pytest

from kvmesh.mesh.plane.server import Call
from kvmesh.protocol.errors import DrainingError, InvalidRequestError
from kvmesh.protocol.messages import NO_LAYOUT, Control, ControlAction, ControlReply, encode
from kvmesh.workers.engine import EngineInfo
from kvmesh.workers.service import Worker
from tests.support.place import FakePlace

INFO = EngineInfo("m", "/m", 32, 64, 512, 8, NO_LAYOUT, "")


class Engine:
    """The part of an engine that a control call needs."""

    async def control(self, request: Control) -> ControlReply:
        return ControlReply(detail="done", loras=(request.arguments["name"],))


class FakeCall:
    def __init__(self, request: Control) -> None:
        self.body = encode(request)
        self.sent: list[object] = []

    async def send(self, message: object) -> None:
        self.sent.append(message)


LOAD = Control(action=ControlAction.LOAD_LORA, arguments={"name": "poet", "path": "/poet"})


def worker_with(engine: object, info: EngineInfo | None = INFO) -> Worker:
    worker = Worker(cast(Any, engine), FakePlace())
    worker.info = info
    return worker


async def test_adapters_that_come_are_told_to_the_mesh() -> None:
    place = FakePlace()
    worker = Worker(cast(Any, Engine()), place)
    worker.info = INFO
    call = FakeCall(LOAD)
    await worker.control(cast(Call, call))
    await worker.control(cast(Call, FakeCall(LOAD)))
    assert call.sent == [ControlReply(detail="done", loras=("poet",))]
    assert [info.loras for info in place.infos] == [("poet",)]


async def test_an_engine_that_takes_no_orders_says_which_does() -> None:
    with pytest.raises(InvalidRequestError, match="cannot load_lora; vLLM's can"):
        await worker_with(object()).control(cast(Call, FakeCall(LOAD)))


async def test_a_worker_that_is_starting_takes_no_orders() -> None:
    with pytest.raises(DrainingError):
        await worker_with(Engine(), None).control(cast(Call, FakeCall(LOAD)))


async def test_an_order_that_the_engine_cannot_read_is_the_operators_error() -> None:
    """The engine here raises KeyError for a name that is missing."""
    order = Control(action=ControlAction.LOAD_LORA, arguments={"path": "/poet"})
    with pytest.raises(InvalidRequestError, match="the engine does not load_lora: KeyError: 'name'"):
        await worker_with(Engine()).control(cast(Call, FakeCall(order)))
