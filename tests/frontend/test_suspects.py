"""A request that ends the processes of workers is told from those that run beside it, and from network faults."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kvmesh.frontend import suspects
from kvmesh.frontend.suspects import MAX_REMEMBERED, REMEMBERED_S, Condemned, Trial, Trials, fingerprint, has_ended
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.errors import IdentityError, MeshError, PeerLostError, UnreachableError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import GenerateRequest, SamplingParams, Target, WorkerIdentity, pack_tokens
from tests.support.patience import PATIENCE_S

REQUEST = GenerateRequest(request_id=RequestId("r"), model="m", prompt=pack_tokens([1, 2, 3]))


# --- what is remembered -------------------------------------------------------------------------------


def test_a_repeated_request_has_the_same_fingerprint() -> None:
    again = replace(
        REQUEST, request_id=RequestId("s"), worker_id=WorkerId("w"), generated=(7,), sampling=SamplingParams(seed=9)
    )
    assert fingerprint(again) == fingerprint(REQUEST)


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, prompt=pack_tokens([1, 2, 4])),
        replace(REQUEST, model="n"),
        replace(REQUEST, lora="a"),
        replace(REQUEST, cache_salt="tenant"),
        replace(REQUEST, sampling=SamplingParams(temperature=0.5)),
    ],
)
def test_another_request_has_another_fingerprint(other: GenerateRequest) -> None:
    assert fingerprint(other) != fingerprint(REQUEST)


def test_a_condemned_request_is_remembered_for_a_while() -> None:
    condemned = Condemned()
    condemned.add(b"a", now=10.0)
    assert condemned.left_s(b"a", 10.0) == REMEMBERED_S
    assert condemned.left_s(b"b", 10.0) == 0
    assert condemned.left_s(b"a", 10.0 + REMEMBERED_S) == 0
    assert len(condemned) == 0


def test_of_too_many_condemned_requests_the_oldest_is_forgotten() -> None:
    condemned = Condemned()
    for number in range(MAX_REMEMBERED + 1):
        condemned.add(number.to_bytes(4), now=float(number) / 1e6)
    assert len(condemned) == MAX_REMEMBERED
    assert condemned.left_s((0).to_bytes(4), 1.0) == 0
    assert condemned.left_s((1).to_bytes(4), 1.0) > 0


# --- trials -------------------------------------------------------------------------------------------


async def begun(trials: Trials, count: int) -> list["asyncio.Task[Trial]"]:
    tasks = [asyncio.create_task(trials.begin()) for _ in range(count)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_suspects_are_tried_one_at_a_time_in_their_order() -> None:
    tasks = await begun(trials := Trials(), 3)
    assert [task.done() for task in tasks] == [True, False, False]
    tasks[0].result().end()
    second = await tasks[1]
    assert not tasks[2].done()
    second.end()
    third = await tasks[2]
    assert third.is_alone
    third.end()
    (await trials.begin()).end()


async def test_a_trial_without_a_result_lets_the_next_one_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "TRIAL_S", 0.001)
    first, second = [await task for task in await begun(Trials(), 2)]
    assert not first.is_alone
    assert not second.is_alone
    first.end()
    second.end()


async def test_of_very_many_suspects_several_are_tried_at_a_time() -> None:
    tasks = await begun(Trials(), 4 * suspects.MAX_ALONE)
    trials = [task.result() for task in tasks if task.done()]
    assert len(trials) > 2
    assert not any(trial.is_alone for trial in trials)
    for task in tasks:
        (await asyncio.wait_for(task, PATIENCE_S)).end()


async def test_a_suspect_that_leaves_gives_its_turn_away() -> None:
    first, second, third = await begun(Trials(), 3)
    second.cancel()
    await asyncio.wait([second])
    first.result().end()
    assert (await asyncio.wait_for(third, PATIENCE_S)).is_alone
    third.result().end()


# --- a process that has ended -------------------------------------------------------------------------


async def verdict(answer: Callable[[Call], object] | None, worker_id: str) -> bool:
    """Return what is found of a worker whose address answers so; None: nobody listens there any more."""

    async def identify(call: Call) -> None:
        assert answer is not None
        await call.send(answer(call))

    server, plane = PlaneServer({"identify": identify}), PlaneClient()
    address = await server.start("127.0.0.1", 0)
    try:
        if answer is None:
            await server.close()
        return await has_ended(plane, Target(worker_id=WorkerId(worker_id), name="w", address=address))
    finally:
        await plane.close()
        await server.close()


async def test_a_worker_that_answers_has_not_ended() -> None:
    assert not await verdict(lambda _: WorkerIdentity(worker_id=WorkerId("w1")), "w1")


async def test_a_worker_whose_address_another_one_has_has_ended() -> None:
    assert await verdict(lambda _: WorkerIdentity(worker_id=WorkerId("w2")), "w1")


async def test_a_worker_at_whose_address_nobody_listens_has_ended() -> None:
    assert await verdict(None, "w1")


class Ending(PlaneClient):
    """Breaks connections off as a process does that is about to close its port, and then refuses them."""

    def __init__(self, *errors: MeshError) -> None:
        super().__init__()
        self._errors = list(errors)

    async def ask(self, *args: Any, **more: Any) -> Any:
        raise self._errors.pop(0)


def caused_by(error: MeshError, cause: OSError) -> MeshError:
    error.__cause__ = cause
    return error


REFUSED = caused_by(UnreachableError("cannot connect"), ConnectionRefusedError())


@pytest.mark.parametrize(
    "first",
    [
        PeerLostError("the connection was lost"),
        caused_by(UnreachableError("cannot connect"), ConnectionResetError()),
        caused_by(IdentityError("cannot connect: it hung up in the handshake"), ConnectionResetError()),
    ],
)
async def test_a_port_that_is_being_closed_is_asked_again(first: MeshError) -> None:
    target = Target(worker_id=WorkerId("w1"), name="w", address="127.0.0.1:1")
    assert await has_ended(Ending(first, REFUSED), target)


async def test_a_worker_that_cannot_be_reached_has_not_ended() -> None:
    target = Target(worker_id=WorkerId("w1"), name="w", address="127.0.0.1:1")
    assert not await has_ended(Ending(caused_by(UnreachableError("no route"), TimeoutError()), REFUSED), target)
