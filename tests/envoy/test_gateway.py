"""Requests reach their workers through a real Envoy that asks the endpoint picker, in both of its modes."""

import asyncio
import json
import signal
import threading
import time
from typing import Any

import httpx
import pytest

from tests.envoy.conftest import LARGE, MODES, SMALL, GatewayMesh, until
from tests.envoy.proxy import Mode
from tests.support.patience import PATIENCE_S

both_modes = pytest.mark.parametrize("mode", MODES)
STORY = "Once upon a time there was a small fox who lived at the edge of a very old forest. " * 6


def stream(url: str, model: str, tokens: int) -> Any:
    """Open a stream of so many tokens; the first one has come when the headers have."""
    body = {"model": model, "messages": [{"role": "user", "content": "tell"}], "stream": True, "max_tokens": tokens}
    body["ignore_eos"] = True
    return httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


@both_modes
def test_a_chat_goes_to_the_worker_that_has_its_prefix(mesh: GatewayMesh, mode: Mode) -> None:
    text = f"{mode}: {STORY}"
    first = mesh.trace(mode, text, disaggregate=False)
    again = [mesh.trace(mode, text, disaggregate=False) for _ in range(4)]
    assert {one["decode_worker"] for one in again} == {first["decode_worker"]}
    assert first["cached_tokens"] < 16 < min(one["cached_tokens"] for one in again)
    mesh.until_idle()


@both_modes
def test_prompts_without_a_prefix_are_spread(mesh: GatewayMesh, mode: Mode) -> None:
    seen = {mesh.trace(mode, f"{number} {mode} {STORY}", disaggregate=False)["decode_worker"] for number in range(6)}
    assert seen == {"d1", "d2"}


@both_modes
def test_each_model_has_its_own_workers(mesh: GatewayMesh, mode: Mode) -> None:
    assert mesh.trace(mode, "hello", SMALL)["decode_worker"] == "one"
    assert mesh.trace(mode, "hello", LARGE)["decode_worker"] in {"d1", "d2"}


@both_modes
def test_both_halves_run_where_the_headers_say(mesh: GatewayMesh, mode: Mode) -> None:
    trace = mesh.trace(mode, f"halves {mode} {STORY}", disaggregate=True)
    assert trace["prefill_worker"] == "p1"
    assert trace["decode_worker"] in {"d1", "d2"}
    assert trace["kv_bytes_pulled"] > 0
    assert trace["route_reason"] == "named by the gateway"
    mesh.until_idle()


@both_modes
def test_clients_cannot_choose_the_worker(mesh: GatewayMesh, mode: Mode) -> None:
    headers = {"x-kvmesh-worker": "one", "x-gateway-destination-endpoint": mesh.endpoints["one"]}
    body = {"model": LARGE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "kvmesh": {"trace": True}}
    reply = httpx.post(f"{mesh.urls[mode]}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)
    assert reply.json()["kvmesh"]["decode_worker"] in {"d1", "d2"}


@both_modes
def test_long_bodies_and_streams_pass_whole(mesh: GatewayMesh, mode: Mode) -> None:
    body = json.dumps({"model": LARGE, "prompt": "fox", "max_tokens": 40, "ignore_eos": True, "stream": True})
    reply = httpx.post(f"{mesh.urls[mode]}/v1/completions", content=body + " " * 200_000, timeout=PATIENCE_S)
    events = [line for line in reply.text.splitlines() if line.startswith("data:")]
    assert reply.status_code == 200
    assert events[-1] == "data: [DONE]"
    mesh.until_idle()


@both_modes
def test_a_model_is_renamed_on_its_way(mesh: GatewayMesh, mode: Mode) -> None:
    body = {"model": "public", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    headers = {"x-gateway-model-name-rewrite": SMALL}
    reply = httpx.post(f"{mesh.urls[mode]}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)
    assert (reply.status_code, reply.json()["model"]) == (200, SMALL)


@both_modes
def test_lists_of_models_come_from_any_endpoint(mesh: GatewayMesh, mode: Mode) -> None:
    reply = httpx.get(f"{mesh.urls[mode]}/v1/models", timeout=PATIENCE_S)
    assert {row["id"] for row in reply.json()["data"]} == {LARGE, SMALL}


@both_modes
def test_refusals_of_the_picker_reach_the_client(mesh: GatewayMesh, mode: Mode) -> None:
    reply = mesh.chat(mode, "hi", "nothing")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    broken = httpx.post(f"{mesh.urls[mode]}/v1/chat/completions", content=b"{", timeout=PATIENCE_S)
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")


@both_modes
def test_refusals_of_the_endpoint_reach_the_client(mesh: GatewayMesh, mode: Mode) -> None:
    reply = mesh.chat(mode, "hi", no_such_parameter=1)
    assert reply.status_code == 400
    assert "no_such_parameter" in reply.json()["error"]["message"]


@both_modes
def test_a_full_model_waits_and_then_gets_a_429(mesh: GatewayMesh, mode: Mode) -> None:
    with stream(mesh.urls[mode], SMALL, 400) as running:
        assert running.status_code == 200
        began = time.monotonic()
        reply = mesh.chat(mode, "hi", SMALL)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        assert time.monotonic() - began >= 0.9  # Envoy's own limit is 0.2 s: the picker has asked for more time
    mesh.until_idle()


@both_modes
def test_a_waiting_request_runs_when_another_ends(mesh: GatewayMesh, mode: Mode) -> None:
    found: list[int] = []
    with stream(mesh.urls[mode], SMALL, 400):
        waiting = threading.Thread(target=lambda: found.append(mesh.chat(mode, "hi", SMALL).status_code))
        waiting.start()
        until(lambda: mesh.health()["waiting"] == 1, "it waits")
    waiting.join(PATIENCE_S)
    assert found == [200]
    mesh.until_idle()


@both_modes
def test_a_client_that_leaves_frees_its_worker(mesh: GatewayMesh, mode: Mode) -> None:
    with stream(mesh.urls[mode], SMALL, 1000) as running:
        chunks = running.iter_raw()  # an iterator that is dropped closes the connection
        assert next(chunks).startswith(b"data:")
        assert mesh.health()["in_flight"] == 1
    mesh.until_idle()
    assert mesh.chat(mode, "hi", SMALL).status_code == 200


@both_modes
def test_many_clients_that_leave_at_once_leave_no_load(mesh: GatewayMesh, mode: Mode) -> None:
    async def leaving(client: httpx.AsyncClient, number: int) -> int:
        text = f"{number} tell me more " * 20
        body = {"model": LARGE, "messages": [{"role": "user", "content": text}], "stream": True, "ignore_eos": True}
        async with client.stream("POST", f"{mesh.urls[mode]}/v1/chat/completions", json=body) as reply:
            if number % 3:  # a third leaves with the headers
                await anext(reply.aiter_raw(), b"")
            return reply.status_code

    async def all_at_once() -> set[int]:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            return set(await asyncio.gather(*[leaving(client, number) for number in range(48)]))

    # 504: Envoy waits for the picker for a limited time, which 48 at once may exceed on a busy machine.
    assert asyncio.run(all_at_once()) <= {200, 429, 504}
    mesh.until_idle()


@both_modes
def test_a_picker_that_was_killed_is_missed_until_it_is_back(mesh: GatewayMesh, mode: Mode) -> None:
    mesh.picker.send_signal(signal.SIGKILL)
    mesh.picker.wait()
    began = time.monotonic()
    assert mesh.chat(mode, "hi").status_code >= 500
    assert time.monotonic() - began < 5
    mesh.start_picker()
    mesh.until_routed()
    assert mesh.trace(mode, "hello again")["decode_worker"] in {"d1", "d2"}


def rest_without_picker(mesh: GatewayMesh, url: str) -> bytes:
    """Return a streamed answer whose picker is killed after the first part; what breaks off ends with a note."""
    with stream(url, SMALL, 40) as running:
        chunks = running.iter_raw()
        text = next(chunks)
        mesh.picker.send_signal(signal.SIGKILL)
        mesh.picker.wait()
        try:
            text += b"".join(chunks)
        except httpx.RemoteProtocolError:
            text += b"(broken off)"
    mesh.start_picker()
    mesh.until_routed()
    return text


@both_modes
def test_an_answer_breaks_off_with_its_picker(mesh: GatewayMesh, mode: Mode) -> None:
    assert rest_without_picker(mesh, mesh.urls[mode]).endswith(b"(broken off)")


def test_an_answer_outlives_its_picker_where_envoy_fails_open(mesh: GatewayMesh) -> None:
    assert rest_without_picker(mesh, mesh.open_url).endswith(b"data: [DONE]\n\n")
