"""Operators control workers over HTTP: who may, and what reaches the worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvmesh.frontend.crew import WorkerCrew
from kvmesh.frontend.http import FrontendApi, HttpSettings
from kvmesh.frontend.keys.guard import ApiKeyGuard
from kvmesh.frontend.keys.keyfile import KeyLine, hashed, written
from kvmesh.frontend.models import ModelRegistry
from kvmesh.mesh.http.server import listening
from kvmesh.protocol.errors import InvalidRequestError, UnreachableError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Control, ControlAction, ControlReply, Role, WorkerStatus
from tests.support.generator import ScriptedGenerator
from tests.support.routing import card

STATUS = WorkerStatus(state="serving", running=2, total_blocks=64)


class FakePlane:
    """Answers for the workers, by their addresses."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Control]] = []
        self.failure: Exception | None = None

    async def ask(self, address: str, method: str, body: Any, kind: Any, timeout_s: float) -> ControlReply:
        assert method == "control"
        self.asked.append((address, body))
        if self.failure is not None:
            raise self.failure
        if body.action is ControlAction.STATUS:
            return ControlReply(status=STATUS)
        return ControlReply(detail="done", worker_id=WorkerId("new") if body.action is ControlAction.SET_ROLE else None)


class Operator:
    def __init__(self, url: str, session: aiohttp.ClientSession, plane: FakePlane) -> None:
        self.plane = plane
        self._url, self._session = url, session

    async def list(self, key: str = "sk-admin") -> tuple[int, Any]:
        async with self._session.get(f"{self._url}/kvmesh/workers", headers=headers(key)) as reply:
            return reply.status, await reply.json()

    async def control(self, worker: str, body: Any, key: str = "sk-admin") -> tuple[int, Any]:
        url = f"{self._url}/kvmesh/workers/{worker}/control"
        async with self._session.post(url, json=body, headers=headers(key)) as reply:
            return reply.status, await reply.json()


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@asynccontextmanager
async def operating(keys: Path | None) -> AsyncIterator[Operator]:
    plane, models = FakePlane(), ModelRegistry()
    for one in (card("p1", Role.PREFILL), card("d1"), card("d2")):
        models.add(one)
    resting = card("d3", resting="drained")
    crew = WorkerCrew(plane, lambda: [*models.cards(), resting])  # type: ignore[arg-type]
    api = FrontendApi(HttpSettings(), models, ScriptedGenerator(), crew=crew)
    api.app.guard = None if keys is None else ApiKeyGuard(str(keys))
    async with listening(api.app, "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:
        yield Operator(url, session, plane)


@pytest.fixture
async def operator(tmp_path: Path) -> AsyncIterator[Operator]:
    lines = [
        KeyLine(name="ops", sha256=hashed("sk-admin"), admin=True),
        KeyLine(name="user", sha256=hashed("sk-user")),
    ]
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{written(line)}\n" for line in lines))
    async with operating(keys) as one:
        yield one


async def test_all_workers_are_listed_with_their_own_words(operator: Operator) -> None:
    status, body = await operator.list()
    assert status == 200
    found = {one["id"]: one for one in body["workers"]}
    assert set(found) == {"p1", "d1", "d2", "d3"}
    assert found["d1"]["status"]["running"] == 2 and found["d3"]["resting"] == "drained"


async def test_a_worker_that_does_not_answer_is_listed_with_the_reason(operator: Operator) -> None:
    operator.plane.failure = UnreachableError("nobody is there")
    _, body = await operator.list()
    assert [one["status"] for one in body["workers"]] == [None] * 4
    assert "nobody is there" in body["workers"][0]["problem"]


async def test_an_action_reaches_its_worker(operator: Operator) -> None:
    status, body = await operator.control("d1", {"action": "log_level", "arguments": {"level": "debug"}})
    assert (status, body["detail"]) == (200, "done")
    [(_, asked)] = operator.plane.asked
    assert asked == Control(action=ControlAction.LOG_LEVEL, arguments={"level": "debug"})


async def test_a_worker_that_rests_can_be_resumed(operator: Operator) -> None:
    assert (await operator.control("d3", {"action": "resume"}))[0] == 200


async def test_a_change_of_role_says_the_new_id(operator: Operator) -> None:
    _, body = await operator.control("d1", {"action": "set_role", "arguments": {"role": "prefill"}})
    assert body["worker"] == "new"


@pytest.mark.parametrize(("key", "status"), [("sk-user", 403), ("", 401), ("sk-other", 401)])
async def test_only_an_admin_key_controls(operator: Operator, key: str, status: int) -> None:
    assert (await operator.list(key))[0] == status
    assert (await operator.control("d1", {"action": "drain"}, key))[0] == status
    assert operator.plane.asked == []


async def test_where_there_are_no_keys_nobody_controls() -> None:
    async with operating(None) as operator:
        status, body = await operator.control("d1", {"action": "drain"})
    assert status == 403 and "kvmesh keys new --admin" in body["error"]["message"]
    assert operator.plane.asked == []


@pytest.mark.parametrize(
    "body",
    [
        {"action": "explode"},
        {"action": "status"},
        {},
        {"action": "drain", "arguments": {"x": 1}},
        {"action": "drain", "more": 1},
    ],
)
async def test_what_is_no_action_is_refused(operator: Operator, body: dict[str, Any]) -> None:
    assert (await operator.control("d1", body))[0] == 400
    assert operator.plane.asked == []


async def test_an_unknown_worker_is_a_404(operator: Operator) -> None:
    status, body = await operator.control("nobody", {"action": "drain"})
    assert status == 404 and "there is no worker 'nobody'" in body["error"]["message"]


async def test_what_the_worker_refuses_is_the_callers_error(operator: Operator) -> None:
    operator.plane.failure = InvalidRequestError("this worker's engine cannot sleep")
    status, body = await operator.control("d1", {"action": "sleep"})
    assert status == 400 and "cannot sleep" in body["error"]["message"]
