"""A worker changes its role in the right order, and refuses what it cannot do."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from kvmesh.protocol.errors import DrainingError, EngineError, InvalidRequestError, WrongStateError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import NO_LAYOUT, Control, ControlAction, ControlReply, GenerateRequest, Role, encode
from kvmesh.workers.engine import EngineInfo, EngineLoad
from kvmesh.workers.life import WorkerLife
from kvmesh.workers.service import Worker
from kvmesh.workers.states import WorkerOrder, WorkerState
from tests.support.patience import PATIENCE_S
from tests.support.place import FakePlace

INFO = EngineInfo("m", "/m", 32, 64, 512, 8, NO_LAYOUT, "shm", roles=tuple(Role))


class Engine:
    """The part of an engine that a change of role needs."""

    def __init__(self, *offers: int) -> None:
        self._offers = list(offers)  # that stand, at each look
        self.names: list[WorkerId] = []

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0, 64, self._offers.pop(0) if self._offers else 0)

    def rename(self, worker_id: WorkerId) -> None:
        self.names.append(worker_id)


def turning(
    role: Role = Role.PREFILL, engine: object = None, drain_timeout_s: float = 5.0
) -> tuple[WorkerLife, FakePlace, Callable[[Role], Any]]:
    place = FakePlace(role)
    one = WorkerLife(cast(Any, engine or Engine()), place, lambda: INFO, drain_timeout_s)
    return one, place, one.turn


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


async def a_request(one: WorkerLife) -> asyncio.Task[Any]:
    async def serve() -> None:
        task = asyncio.current_task()
        assert task is not None
        one.requests.add(task)
        try:
            await asyncio.Event().wait()
        finally:
            one.requests.discard(task)

    task = asyncio.create_task(serve())
    await until(lambda: task in one.requests)
    return task


async def test_it_leaves_the_mesh_and_comes_back_under_another_id() -> None:
    engine = Engine()
    _, place, set_role = turning(engine=engine)
    before = place.worker_id
    said = await set_role(Role.DECODE)
    assert place.done == ["leave", "change", "join as decode"]
    assert said == f"it is a decode worker now, {place.worker_id}"
    assert place.worker_id != before
    assert engine.names == [place.worker_id]


async def test_what_runs_is_finished_before_it_changes() -> None:
    one, place, set_role = turning()
    request = await a_request(one)
    asked = asyncio.create_task(set_role(Role.DECODE))
    await until(lambda: place.done == ["leave"])
    for _ in range(20):
        await asyncio.sleep(0)
    assert (place.done, place.states.to_role) == (["leave"], Role.DECODE)
    request.cancel()  # as if it had ended
    await asked
    assert place.done == ["leave", "change", "join as decode"]


async def test_what_it_offers_is_waited_for() -> None:
    engine = Engine(2, 1)
    _, place, set_role = turning(engine=engine)
    await set_role(Role.DECODE)
    assert engine.load().offers == 0
    assert place.done[-1] == "join as decode"


async def test_requests_that_take_too_long_are_sent_elsewhere() -> None:
    one, _, set_role = turning(drain_timeout_s=0.01)
    request = await a_request(one)
    await set_role(Role.DECODE)
    with pytest.raises(asyncio.CancelledError, match="changes its role"):
        await request


async def test_a_worker_that_becomes_aggregated_says_so_in_english() -> None:
    _, place, set_role = turning(engine=Engine())
    assert await set_role(Role.AGGREGATED) == f"it is an aggregated worker now, {place.worker_id}"


async def test_an_unfetched_offer_delays_a_turn_by_one_drain() -> None:
    _, place, set_role = turning(engine=Engine(*[1] * 1000), drain_timeout_s=0.05)
    await set_role(Role.DECODE)
    assert place.done[-1] == "join as decode"


async def test_the_role_that_it_has_changes_nothing() -> None:
    made, call = worker(Engine(), role=Role.DECODE), set_role_call(role="decode")
    await made.control(call)
    assert call.sent == [ControlReply(detail="it is a decode worker already", worker_id=WorkerId("w-0"))]
    assert place_of(made).done == []


async def test_a_second_change_is_refused_until_the_first_has_ended() -> None:
    one, place, set_role = turning()
    request = await a_request(one)
    asked = asyncio.create_task(set_role(Role.DECODE))
    await until(lambda: place.states.to_role is not None)
    for role in Role:
        with pytest.raises(WrongStateError, match="is becoming a decode worker already; ask again"):
            await set_role(role)
    request.cancel()
    await asked
    await set_role(Role.PREFILL)
    assert (place.states.turns, place.role) == (2, Role.PREFILL)


async def test_a_caller_who_leaves_does_not_stop_it() -> None:
    one, place, set_role = turning()
    request = await a_request(one)
    asked = asyncio.create_task(set_role(Role.DECODE))
    await until(lambda: place.done == ["leave"])
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    request.cancel()
    await until(lambda: "join as decode" in place.done)
    assert place.states.takes_requests
    one.check_health()


async def test_a_stop_gives_the_turn_up_and_tells_the_caller() -> None:
    one, place, set_role = turning()
    request = await a_request(one)
    asked = asyncio.create_task(set_role(Role.DECODE))
    await until(lambda: place.done == ["leave"])
    await one.end()
    with pytest.raises(DrainingError, match="w-0 is shutting down"):
        await asked
    with pytest.raises(DrainingError, match="this worker is shutting down"):
        await set_role(Role.DECODE)
    assert (place.done, place.states.state, request.done()) == (["leave"], WorkerState.STOPPING, False)
    request.cancel()


async def test_a_failed_turn_ends_the_worker() -> None:
    one, place, set_role = turning()

    def fail() -> None:
        raise OSError("no port is left")

    place.on_change = fail
    one.check_health()
    with pytest.raises(OSError, match="no port"):
        await set_role(Role.DECODE)
    with pytest.raises(EngineError, match="could not change its role: OSError: no port is left"):
        one.check_health()


# --- the calls of the worker ------------------------------------------------------------------------------------------


class Call:
    def __init__(self, message: object) -> None:
        self.body = encode(message)
        self.sent: list[Any] = []

    async def send(self, message: object) -> None:
        self.sent.append(message)


def set_role_call(**arguments: str) -> Any:
    return Call(Control(action=ControlAction.SET_ROLE, arguments=arguments))


def worker(engine: object, info: EngineInfo = INFO, role: Role = Role.PREFILL, kind: str = "mock") -> Worker:
    place = FakePlace(role)
    place.engine_kind = kind
    made = Worker(cast(Any, engine), place)
    made.info = info
    return made


def place_of(made: Worker) -> FakePlace:
    return cast(FakePlace, made._place)


async def test_control_carries_it_out() -> None:
    made, call = worker(Engine()), set_role_call(role="decode")
    await made.control(call)
    assert [reply.worker_id for reply in call.sent] == ["w-1"]
    assert place_of(made).role is Role.DECODE


@pytest.mark.parametrize("arguments", [{}, {"role": ""}, {"role": "cook"}])
async def test_without_a_role_the_error_says_which_there_are(arguments: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match=r"needs the argument 'role'.*one of aggregated, prefill, decode"):
        await worker(Engine()).control(set_role_call(**arguments))


async def test_an_engine_that_cannot_is_refused_by_its_name() -> None:
    for engine, info in ((object(), INFO), (Engine(), replace(INFO, roles=()))):
        made = worker(engine, info, kind="vllm")
        with pytest.raises(InvalidRequestError, match=r"with the engine vllm cannot change its role.*; torch and mock"):
            await made.control(set_role_call(role="decode"))
        assert place_of(made).states.takes_requests


async def test_a_role_without_a_table_in_the_profile_is_refused() -> None:
    made = worker(Engine(), replace(INFO, roles=(Role.PREFILL,)))
    with pytest.raises(InvalidRequestError, match="cannot become a decode worker; its profile has no table"):
        await made.control(set_role_call(role="decode"))


async def test_requests_of_the_old_role_are_sent_elsewhere() -> None:
    made = worker(Engine())
    whole: Any = Call(GenerateRequest(request_id=RequestId("r"), model="m", prompt=b"\0\0\0\0"))
    leg: Any = Call(GenerateRequest(request_id=RequestId("r"), model="m", prompt=b"\0\0\0\0", offer_kv=True))
    with pytest.raises(InvalidRequestError, match="a prefill worker only prefills"):
        await made.generate(whole)
    place_of(made).states.order(WorkerOrder.TURN, Role.DECODE)
    for call in (whole, leg):
        with pytest.raises(DrainingError, match="is becoming a decode worker"):
            await made.generate(call)
    place_of(made).states.failed(WorkerState.TURNING)
    place_of(made).states.state = WorkerState.SERVING
    await made.control(set_role_call(role="decode"))
    with pytest.raises(DrainingError, match="has become a decode worker"):
        await made.generate(leg)
