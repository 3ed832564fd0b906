"""A frontend remembers requests while somebody wants that, and a process answers questions about them."""

import asyncio
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.frontend.timeline import AnswerRecord, RequestTimeline, Timelines
from kvmesh.frontend.whatif import recent as memory
from kvmesh.frontend.whatif.question import PastMesh, WhatIfQuestion
from kvmesh.frontend.whatif.recent import RecentRequests
from kvmesh.frontend.whatif.runner import WhatIfRunner, read_question
from kvmesh.protocol.errors import EngineError, InvalidRequestError, MeshError, OverloadedError
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import Role
from tests.frontend.whole_mesh import MODEL, WORKER, running_frontend, running_worker, whole_mesh
from tests.support.patience import PATIENCE_S

MESH = PastMesh(model="m", block_size=16, blocks=64, max_num_seqs=4, max_step_tokens=512)
ECHO = "import sys; print('{\"asked\": ' + sys.stdin.readline() + '}')"
REFUSE = 'import sys; sys.stdin.read(); print(\'{"refused": "too few", "hint": "send more"}\')'
CRASH = "import sys; sys.stdin.read(); sys.exit(7)"
HANG = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"


def end_one(timelines: Timelines) -> None:
    """Have one request come and end."""
    timeline = timelines.begin(RequestId("r"), "completions")
    if timeline is not None:
        timeline.answers = (AnswerRecord(0),)
        timelines.end(timeline, "ok")


def runner(program: str, *arguments: str) -> WhatIfRunner:
    """Return a runner whose process is `program`, and that remembers one request."""
    timelines = Timelines()
    recent = RecentRequests(timelines)
    recent.watch()
    end_one(timelines)
    return WhatIfRunner(recent, lambda _: [MESH], (sys.executable, "-c", program, *arguments))


# --- what is remembered -------------------------------------------------------------------------------------------


def test_nothing_is_remembered_while_nobody_wants_it() -> None:
    timelines = Timelines()
    recent = RecentRequests(timelines)
    end_one(timelines)
    assert recent.lines() == [] and not timelines.is_watched
    ends = [recent.watch(), recent.watch()]
    end_one(timelines)
    ends[0]()
    end_one(timelines)
    ends[1]()
    assert len(recent.lines()) == 2 and not timelines.is_watched
    recent.watch()
    assert recent.lines() == []  # what came before the pause would look like a gap in the load


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    timelines = Timelines()
    recent = RecentRequests(timelines)
    recent.watch()
    monkeypatch.setattr(memory, "MAX_REQUESTS", 5)
    for _ in range(9):
        end_one(timelines)
    assert len(recent.lines()) == 5
    monkeypatch.setattr(memory, "MAX_BYTES", 2 * len(recent.lines()[0]))
    end_one(timelines)
    assert len(recent.lines()) <= 2


def test_a_line_has_no_text() -> None:
    timelines = Timelines()
    recent = RecentRequests(timelines)
    recent.watch()
    timelines.look(check_no_text)
    end_one(timelines)
    [line] = recent.lines()
    assert b'"endpoint":"completions"' in line and b'"ts":' in line


def check_no_text(timeline: RequestTimeline) -> None:
    assert not {"prompt", "messages", "text"} & set(timeline.__struct_fields__)


# --- the process --------------------------------------------------------------------------------------------------


async def test_the_process_gets_question_and_mesh_first() -> None:
    reply = await runner(ECHO).ask(WhatIfQuestion(decode="+1"))
    assert b'"decode":"+1"' in reply and b'"max_num_seqs":4' in reply


async def test_a_refusal_of_the_process_is_the_callers() -> None:
    with pytest.raises(InvalidRequestError, match="too few; send more"):
        await runner(REFUSE).ask(WhatIfQuestion())


async def test_a_process_that_dies_is_our_failure() -> None:
    with pytest.raises(EngineError, match="see the log"):
        await runner(CRASH).ask(WhatIfQuestion())


async def test_one_question_at_a_time_and_none_survives_its_caller(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    asked = runner(HANG, str(file))
    first = asyncio.create_task(asked.ask(WhatIfQuestion()))
    async with asyncio.timeout(PATIENCE_S):
        while not (file.exists() and file.read_text()):
            await asyncio.sleep(0.01)
    with pytest.raises(OverloadedError, match="another question"):
        await asked.ask(WhatIfQuestion())
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not asked.is_busy
    assert not psutil.pid_exists(int(file.read_text()))


async def test_without_memory_the_way_to_have_one_is_told() -> None:
    with pytest.raises(InvalidRequestError, match="--access-log"):
        await WhatIfRunner(RecentRequests(Timelines()), lambda _: [MESH]).ask(WhatIfQuestion())


@pytest.mark.parametrize("query", [{"decoder": "+1"}, {"last_s": "soon"}, {"limit": "1"}, {"policy": "k" * 500}])
def test_a_bad_question_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(MeshError, match="the question cannot be read"):
        read_question(query)


# --- over HTTP ----------------------------------------------------------------------------------------------------


def test_a_frontend_asks_a_real_process_about_its_workers(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-operator\nsk-acme acme\n")
    settings = {"access_log_file": str(tmp_path / "log"), "api_keys_file": str(keys)}
    folder = Path(CHECKPOINT_DIR)
    with whole_mesh(tmp_path / "mesh", folder, 1024, **settings) as url, httpx.Client(base_url=url, timeout=60) as http:
        operator, tenant = ({"authorization": f"Bearer {key}"} for key in ("sk-operator", "sk-acme"))
        assert http.get("/kvmesh/whatif").status_code == 401
        assert http.get("/kvmesh/whatif", headers=tenant).status_code == 403
        body = {"model": MODEL, "prompt": "Once upon a time. " * 9, "max_tokens": 4}
        assert http.post("/v1/completions", json=body, headers=operator).status_code == 200
        reply = http.get("/kvmesh/whatif", params={"decode": "+1"}, headers=operator)
        assert reply.status_code == 400
        found = "aggregated and other workers are not simulated"
        assert found in reply.json()["error"]["message"]
        page = http.get("/ui/whatif", headers=operator)
        assert (
            page.status_code == 200 and found in page.json()["refused"]
        )  # the page shows why, which is no fault of it
        assert http.get("/ui/whatif", headers=tenant).status_code == 403


async def test_workers_that_joined_while_frontends_met_are_known(tmp_path: Path) -> None:
    keys, place = tmp_path / "keys", f"file:{tmp_path / 'mesh'}"
    keys.write_text("sk-operator\n")
    headers = {"authorization": "Bearer sk-operator"}
    worker = running_worker(WORKER, Role.AGGREGATED, place, Path(CHECKPOINT_DIR), 1024)
    async with (
        worker,
        running_frontend(place, api_keys_file=str(keys), drain_notice_s=0.0) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        reply = await http.get("/kvmesh/whatif", headers=headers)
    assert "no requests are remembered" in reply.json()["error"]["message"]
