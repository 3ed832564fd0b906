"""Tests of routing in a mesh: as callers ask, as the router explains, and in a queue where there is no room."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.protocol.messages import RouterCard, decode
from kvmesh.router.estimate import LEAST
from tests.faults.conftest import in_flight
from tests.faults.prompts import prompt_of
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.streams import Stream, check_mock_answer

MOCK = ["--engine", "mock", "--kv-transfer", "shm"]
LONG = 20_000  # tokens of an answer that does not end by itself in a test
QUEUE = 3  # requests that may wait


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Run one prefill worker and two decode workers; sessions are kept."""
    env = {"KVMESH_ROUTER_AFFINITY_TTL_S": "60"}
    with running_mesh(tmp_path_factory.mktemp("wide"), *MOCK, env=env) as mesh:
        yield mesh
        until_free(mesh)


@pytest.fixture(scope="module", params=["embedded", "remote"])
def any_router(request: pytest.FixtureRequest, wide: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    if request.param == "embedded":
        yield wide
        return
    with running_mesh(tmp_path_factory.mktemp("remote"), *MOCK, "--router", "remote") as mesh:
        yield mesh
        until_free(mesh)


@pytest.fixture(scope="module", params=["embedded", "remote"])
def _narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    flags = ["--prefill", "0", "--decode", "0", "--aggregated", "1", "--max-num-seqs", "1", "--router", request.param]
    env = {"KVMESH_ROUTER_QUEUE_MAX_REQUESTS": str(QUEUE), "KVMESH_ROUTER_ADMISSION": "false"}
    with running_mesh(tmp_path_factory.mktemp("narrow"), *MOCK, *flags, env=env) as mesh:
        yield mesh


@pytest.fixture
def narrow(_narrow: Mesh) -> Iterator[Mesh]:
    """Run one worker with one request at a time, and a queue for QUEUE. After each test nothing is in flight.

    Only the queue refuses: what admission lets in depends on how fast the machine was in the tests before.
    """
    yield _narrow
    until_free(_narrow)


@pytest.fixture
def running(narrow: Mesh) -> Iterator[Stream]:
    """Run a request that has the worker of `narrow` for itself until it leaves, at the latest after the test."""
    with taken(narrow) as stream:
        yield stream


@contextmanager
def taken(mesh: Mesh) -> Iterator[Stream]:
    """Take the only seat of a mesh."""
    stream = Stream(mesh.url, prompt_of(20), LONG)
    try:
        yield stream.until_tokens(1)
    finally:
        stream.leave()


def of_router(mesh: Mesh, name: str, **labels: str) -> float:
    """A metric of the router, wherever it runs."""
    urls = [decode(card, RouterCard).http_url for card in mesh.entries("routers/").values()]
    return sum(mesh.metric(name, url=f"{url}/metrics" if url else None, **labels) for url in urls)


def until_free(mesh: Mesh) -> None:
    """Wait until nothing is in flight at the frontend, the workers and a router by itself."""
    gauges = ("kvmesh_router_waiting", "kvmesh_router_in_flight")
    until(lambda: not in_flight(mesh) and not any(of_router(mesh, name) for name in gauges), what="nothing in flight")


def complete(mesh: Mesh, prompt: list[int], headers: Mapping[str, str] | None = None, **body: Any) -> httpx.Response:
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | body
    with mesh.http as http:
        return http.post("/v1/completions", json=fields, headers=dict(headers or {}))


def preview(mesh: Mesh, prompt: list[int], **headers: str) -> dict[str, Any]:
    return mesh.route(prompt, {f"x-kvmesh-{name}": value for name, value in headers.items()})


def chosen(explanation: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the chosen candidates by leg."""
    return {c["leg"]: c for c in explanation["candidates"] if c["note"] == "chosen"}


# --- as callers ask -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decode-0", "decode-1"])
def test_a_header_names_the_worker_that_answers(wide: Mesh, name: str) -> None:
    by_name = complete(wide, prompt_of(40), {"x-kvmesh-worker": name}, kvmesh={"trace": True}).json()
    assert by_name["kvmesh"]["decode_worker"] == name
    worker_id = wide.workers()[name].worker_id
    by_id = complete(wide, prompt_of(40), {"x-kvmesh-worker": worker_id, "x-kvmesh-dp-rank": "0"})
    assert by_id.status_code == 200, by_id.text


def test_a_header_names_the_worker_that_prefills(wide: Mesh) -> None:
    """Reuse works where the whole prompt is cached on the decode worker, too."""
    pinned = {"x-kvmesh-worker": "decode-0", "x-kvmesh-prefill-worker": "prefill-0"}
    for _ in range(2):
        answer = complete(wide, prompt_of(64, 5), pinned, kvmesh={"trace": True}).json()
        assert (answer["kvmesh"]["prefill_worker"], answer["kvmesh"]["decode_worker"]) == ("prefill-0", "decode-0")


@pytest.mark.parametrize("header", ["x-kvmesh-worker", "x-kvmesh-prefill-worker"])
def test_a_worker_that_is_not_there_is_a_503(wide: Mesh, header: str) -> None:
    response = complete(wide, prompt_of(40), {header: "nobody"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
    assert "nobody" in response.json()["error"]["message"]


def test_a_session_stays_where_it_is(wide: Mesh) -> None:
    def worker_of(number: int, **body: Any) -> str:
        answer = complete(wide, prompt_of(40, 31 * number), kvmesh={"trace": True, "disaggregate": False}, **body)
        return answer.json()["kvmesh"]["decode_worker"]

    assert {worker_of(n) for n in range(6)} == {"decode-0", "decode-1"}, "equal workers are used in turn"
    for session in ("ann", "ben"):
        assert len({worker_of(100 + n, user=session) for n in range(6)}) == 1


# --- as the router explains ---------------------------------------------------------------------------


def test_an_explanation_names_what_happened(any_router: Mesh) -> None:
    mesh, prompt = any_router, prompt_of(150, 3)
    first = complete(mesh, prompt, {"x-kvmesh-explain": "1"}, max_tokens=30)
    report = first.json()["kvmesh"]
    [explanation] = report["explanations"]
    legs = chosen(explanation)
    assert (legs["prefill"]["worker"], legs["decode"]["worker"]) == (report["prefill_worker"], report["decode_worker"])
    assert {c["worker"] for c in explanation["candidates"] if c["leg"] == "decode"} == {"decode-0", "decode-1"}
    assert first.headers["x-kvmesh-worker"] == report["decode_worker"]
    assert first.headers["x-kvmesh-prefill-worker"] == "prefill-0"
    assert first.headers["x-kvmesh-overlap-tokens"] == "0"
    assert first.headers["x-kvmesh-route-reason"] == report["route_reason"]
    assert report["overlap_tokens"] == report["cached_tokens"] == 0


def test_predicted_cached_tokens_are_found(any_router: Mesh) -> None:
    mesh, prompt = any_router, prompt_of(150, 11)
    complete(mesh, prompt)
    expected = len(prompt) // 16 * 16
    until(lambda: preview(mesh, prompt)["decode"]["overlap_blocks"] == expected // 16, what="KV events")
    told = preview(mesh, prompt)
    second = complete(mesh, prompt, {"x-kvmesh-explain": "1"})
    report = second.json()["kvmesh"]
    assert told["decode"]["name"] == second.headers["x-kvmesh-worker"] == report["decode_worker"]
    assert told["prefill"] is report["prefill_worker"] is None
    assert report["overlap_tokens"] == report["cached_tokens"] == expected
    assert second.headers["x-kvmesh-overlap-tokens"] == str(expected)
    assert chosen(report["explanations"][0])["whole"]["overlap_blocks"][0] == expected // 16


def test_a_stream_is_explained_as_well(wide: Mesh) -> None:
    stream = Stream(wide.url, prompt_of(60, 17), 5, kvmesh={"explain": True}).join()
    check_mock_answer(stream)
    assert stream.headers["x-kvmesh-worker"] == stream.trace["decode_worker"]
    assert chosen(stream.trace["explanations"][0])["decode"]["worker"] == stream.trace["decode_worker"]


def test_a_preview_changes_nothing(wide: Mesh) -> None:
    before = wide.metric("kvmesh_router_placements_total")
    asked = [preview(wide, prompt_of(90, 23), session="s")["decode"]["name"] for _ in range(4)]
    assert len(set(asked)) == 1, "nobody was chosen, so nobody's turn has passed"
    assert wide.metric("kvmesh_router_placements_total") == before
    assert wide.metric("kvmesh_router_in_flight") == 0


def test_predictions_are_counted_beside_what_was_found(wide: Mesh) -> None:
    names = ("prompt_tokens", "predicted_reuse_tokens", "reused_tokens")

    def count() -> dict[str, float]:
        return {name: wide.metric(f"kvmesh_router_{name}_total") for name in names}

    prompt = prompt_of(160, 29)
    complete(wide, prompt)
    until(lambda: preview(wide, prompt)["decode"]["overlap_blocks"] == 10, what="KV events")
    before = count()
    answer = complete(wide, prompt).json()
    found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found > 0
    assert {name: value - before[name] for name, value in count().items()} == {
        "prompt_tokens": 160, "predicted_reuse_tokens": 160, "reused_tokens": found,
    }  # fmt: skip


def test_kvmesh_explain_asks_a_running_mesh(wide: Mesh) -> None:
    command = [sys.executable, "-m", "kvmesh", "explain", "--url", wide.observed(wide.url)]
    done = subprocess.run([*command, "--json", "What is a mesh?"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["model"] == "tiny"
    assert chosen(told["explanation"])
    table = subprocess.run([*command, "What is a mesh?"], capture_output=True, text=True, timeout=60).stdout
    assert "prefill-0 would compute the prompt" in table
    assert "decode-1" in table


@pytest.mark.parametrize("any_router", ["remote"], indirect=True)
def test_kvmesh_explain_asks_a_router_itself(any_router: Mesh) -> None:
    [card] = any_router.entries("routers/").values()
    command = [sys.executable, "-m", "kvmesh", "explain", "--json"]
    from_router, from_frontend = (
        subprocess.run([*command, *whom, "What is a mesh?"], capture_output=True, text=True, timeout=60)
        for whom in (["--router", decode(card, RouterCard).http_url], ["--url", any_router.observed(any_router.url)])
    )
    assert from_router.returncode == 0, from_router.stderr
    one, other = json.loads(from_router.stdout), json.loads(from_frontend.stdout)
    assert one["isl_tokens"] == other["isl_tokens"]
    assert chosen(one["explanation"])["prefill"]["worker"] == "prefill-0"


# --- where there is no room ---------------------------------------------------------------------------


def waiting(mesh: Mesh, count: int) -> None:
    until(lambda: of_router(mesh, "kvmesh_router_waiting") == count, what=f"{count} to wait")


def test_waiting_in_the_queue_counts_as_ttft(narrow: Mesh, running: Stream) -> None:
    second = Stream(narrow.url, prompt_of(30), 5)
    waiting(narrow, 1)
    assert preview(narrow, prompt_of(40))["explanation"]["would_wait"]
    assert narrow.metric("kvmesh_worker_waiting_requests", "aggregated-0") == 0, "it waits in the router"
    running.leave()
    check_mock_answer(second.join())
    assert 0 < second.trace["waited_ms"] <= second.trace["ttft_ms"]


def test_a_full_queue_refuses_with_retry_after(narrow: Mesh, running: Stream) -> None:
    queued = [Stream(narrow.url, prompt_of(30, n), 5) for n in range(QUEUE)]
    waiting(narrow, QUEUE)
    refused = Stream(narrow.url, prompt_of(40), 5).join()
    assert (refused.status, refused.error and refused.error["code"]) == (429, "overloaded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    running.leave()
    for stream in queued:
        check_mock_answer(stream.join())


def test_a_higher_priority_overtakes(narrow: Mesh, running: Stream) -> None:
    plain = Stream(narrow.url, prompt_of(30, 1), 60)
    waiting(narrow, 1)
    low = Stream(narrow.url, prompt_of(30, 2), 60, headers={"x-kvmesh-priority": "-1"})
    waiting(narrow, 2)
    high = Stream(narrow.url, prompt_of(30, 3), 60, headers={"x-kvmesh-priority": "1"})
    waiting(narrow, 3)
    running.leave()
    for stream in (low, plain, high):
        check_mock_answer(stream.join())
    assert high.trace["waited_ms"] < plain.trace["waited_ms"] < low.trace["waited_ms"]


@pytest.mark.usefixtures("running")
def test_a_deadline_that_passes_in_the_queue_is_a_504(narrow: Mesh) -> None:
    late = Stream(narrow.url, prompt_of(30), 5, timeout_s=0.3).join()
    assert (late.status, late.error and late.error["code"]) == (504, "deadline_exceeded")
    waiting(narrow, 0)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_the_queue_is_forgotten(narrow: Mesh, running: Stream, stream: bool) -> None:
    gone = Stream(narrow.url, prompt_of(30, 1), 5, stream=stream)
    waiting(narrow, 1)
    stays = Stream(narrow.url, prompt_of(30, 2), 5)
    waiting(narrow, 2)
    gone.leave()
    waiting(narrow, 1)
    running.leave()
    check_mock_answer(stays.join())


@pytest.mark.parametrize("router", ["embedded", pytest.param("remote", marks=pytest.mark.long)])
def test_a_deadline_is_judged_once_answers_were_measured(tmp_path: Path, router: str) -> None:
    flags = ["--prefill", "0", "--decode", "0", "--aggregated", "1", "--max-num-seqs", "1", "--router", router]
    with running_mesh(tmp_path, *MOCK, *flags) as mesh:
        with taken(mesh):
            unknown = Stream(mesh.url, prompt_of(30), LONG, timeout_s=1.0).join()
        assert (unknown.status, unknown.error and unknown.error["code"]) == (504, "deadline_exceeded")
        for number in range(2 * LEAST):
            check_mock_answer(Stream(mesh.url, prompt_of(30, number), 20).join())
        with taken(mesh):
            hopeless = Stream(mesh.url, prompt_of(30), LONG, timeout_s=1.0).join()
        assert (hopeless.status, hopeless.error and hopeless.error["code"]) == (429, "overloaded")
        assert of_router(mesh, "kvmesh_router_refusals_total", reason="late") == 1
        until_free(mesh)
