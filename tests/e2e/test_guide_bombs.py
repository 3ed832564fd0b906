"""Guides as bombs, seen from outside: they get 400, and harm neither other tenants nor the worker."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.mesh import Mesh, running_mesh, until

pytest.importorskip("llguidance")
pytest.importorskip("torch")

MIB = 1 << 20
ORDINARY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    with running_mesh(tmp_path / "run", "--engine", "torch", "--prefill", "0", "--decode", "1") as made:
        yield made


def ask(mesh: Mesh, schema: Any, tenant: str) -> httpx.Response:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
    with mesh.http as http:
        return http.post(
            "/v1/chat/completions", json=body | {"response_format": wanted}, headers={"x-kvmesh-tenant": tenant}
        )


def bombs() -> list[Any]:
    """Return schemas that compiled for minutes and took gigabytes: the first two are refused without compiling."""
    return [
        {"type": "integer", "multipleOf": 9_999_991},
        {"allOf": [{"type": "integer", "multipleOf": 65_521}, {"multipleOf": 31}, {"multipleOf": 7}]},
        *[{"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(1, n)]} for n in (61, 60, 59)],
    ]


def private_bytes(process: psutil.Process) -> int:
    try:
        tree = [process, *process.children(recursive=True)]
        return sum(one.memory_full_info().uss for one in tree)
    except psutil.NoSuchProcess:
        return 0


@pytest.mark.long
def test_bombs_are_refused_and_other_tenants_are_answered_meanwhile(mesh: Mesh) -> None:
    assert ask(mesh, ORDINARY, "alice").status_code == 200
    worker = psutil.Process(mesh.pid("decode-0"))
    before = private_bytes(worker)
    with ThreadPoolExecutor(5) as threads:
        sent = [threads.submit(ask, mesh, bomb, "mallory") for bomb in bombs()]
        until(lambda: sum(answer.done() for answer in sent) >= 2, what="the certain bombs are refused")
        for n in range(3):
            other = {**ORDINARY, "title": str(n)}  # compiled anew
            assert ask(mesh, other, "alice").status_code == 200
        assert private_bytes(worker) - before < 1024 * MIB
        mesh.signal("decode-0", signal.SIGTERM)  # while the others compile
        gone, left = psutil.wait_procs([worker, *worker.children(recursive=True)], timeout=30)
        assert not left, gone
    assert [answer.result().status_code for answer in sent[:2]] == [400, 400]
    assert all(answer.result().status_code in (400, 500, 502, 503) for answer in sent)


def test_a_bomb_is_refused_a_second_time_at_once(mesh: Mesh) -> None:
    bomb = {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(1, 31)]}
    first = ask(mesh, bomb, "mallory")
    assert (first.status_code, "make it simpler" in first.text) == (400, True), first.text
    begun = time.monotonic()
    assert ask(mesh, bomb, "mallory").json() == first.json()
    assert time.monotonic() - begun < 5
    assert psutil.pid_exists(mesh.pid("decode-0"))
