"""A gateway asks an endpoint picker over gRPC, as Envoy does, where to send requests."""

import asyncio
import gzip
import json
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.frontend.picker.metrics import UNSEEN
from kvmesh.protocol.messages import Role
from kvmesh.router.local import LocalBooking
from tests.frontend.picker.conftest import RunningPicker, running
from tests.support.gateway import BUFFERED, CHAT, CHAT_PATH, DUPLEX, NONE, Picked, body_said, head, heard, said
from tests.support.patience import PATIENCE_S
from tests.support.recovery import RECOVERED_S, WITHOUT_S

ENDPOINTS = {"w1": "10.0.0.1:8000", "w2": "10.0.0.2:8000"}
STORY = {"model": "tiny", "messages": [{"role": "user", "content": "a story of the quick brown fox. " * 12}]}
OTHER = {"model": "tiny", "messages": [{"role": "user", "content": "def main(): print('hello') " * 12}]}


@pytest.mark.parametrize("modes", [(DUPLEX, DUPLEX), (BUFFERED, NONE)])
async def test_header_and_metadata_name_the_chosen_workers_endpoint(picker: RunningPicker, modes: tuple) -> None:
    picked = await picker.gateway.pick(modes=modes)
    assert picked.endpoint == picked.metadata == ENDPOINTS[picked.worker or ""]


@pytest.mark.parametrize("body", [STORY, OTHER])
async def test_a_prompt_goes_where_its_prefix_is(picker: RunningPicker, body: dict[str, object]) -> None:
    first = await picker.gateway.serve(body)
    again = [await picker.gateway.serve(body) for _ in range(4)]
    assert {picked.worker for picked in again} == {first.worker}


async def test_a_busy_worker_is_passed_by(picker: RunningPicker) -> None:
    held = picker.gateway.open()
    first = await held.pick(STORY)
    second = await picker.gateway.pick(OTHER)
    assert {first.worker, second.worker} == {"w1", "w2"}
    await held.end()


async def test_a_model_is_served_by_its_own_workers(picker: RunningPicker) -> None:
    await picker.join("other", "10.0.0.3:8000", model="large")
    await picker.until_known("w1", "w2", "other")
    picked = [await picker.gateway.pick(CHAT | {"model": "large"}) for _ in range(4)]
    assert {one.endpoint for one in picked} == {"10.0.0.3:8000"}


async def test_a_model_can_be_renamed_on_the_way(picker: RunningPicker) -> None:
    headers = {"x-gateway-model-name-rewrite": "tiny"}
    body = b'{"seed": 1.50, "model": "public-name", "messages": [{"role": "user", "content": "hi"}]}'
    picked = await picker.gateway.pick(body, headers=headers)
    assert picked.endpoint
    assert json.loads(picked.body) == json.loads(body) | {"model": "tiny"}
    assert picked.headers["content-length"] == str(len(picked.body))


async def test_the_headers_name_both_halves(picker: RunningPicker) -> None:
    for name in ("w1", "w2"):
        await picker.leave(name)
    await picker.join("d1", "10.0.0.5:8000", Role.DECODE, transfer="nixl")
    await picker.join("p1", "10.0.0.6:8000", Role.PREFILL, transfer="nixl")
    await picker.until_known("d1", "p1")
    picked = await picker.gateway.pick(STORY | {"kvmesh": {"disaggregate": True}})
    assert picked.endpoint == "10.0.0.5:8000"
    assert picked.headers == {
        "x-kvmesh-worker": "d1",
        "x-kvmesh-prefill-worker": "p1",
        "x-prefiller-host-port": "10.0.0.6:8000",
    }


async def test_clients_cannot_name_workers(picker: RunningPicker) -> None:
    headers = {"x-kvmesh-worker": "nobody", "x-prefiller-host-port": "10.9.9.9:1", "x-kvmesh-dp-rank": "3"}
    picked = await picker.gateway.pick(CHAT | {"kvmesh": {"worker": "nobody"}}, headers=headers)
    assert picked.worker in ENDPOINTS
    assert set(picked.removed) == {"x-kvmesh-prefill-worker", "x-kvmesh-dp-rank", "x-prefiller-host-port"}


async def test_a_long_body_is_sent_back_whole(picker: RunningPicker) -> None:
    data = json.dumps(CHAT | {"user": "u" * 200, "metadata": {"note": "n" * 150_000}}).encode()
    conversation = picker.gateway.open()
    await conversation.say(head(), body_said(data[:70_000], is_last=False), body_said(data[70_000:]))
    answers = [await conversation.answer() for _ in range(4)]
    assert heard(answers).body == data
    parts = [answer.request_body.response.body_mutation.streamed_response for answer in answers[1:]]
    assert [part.end_of_stream for part in parts] == [False, False, True]
    assert all(len(part.body) <= 65536 for part in parts)
    await conversation.end()


async def test_trailers_end_a_body_too(picker: RunningPicker) -> None:
    conversation = picker.gateway.open()
    await conversation.say(head(), body_said(json.dumps(CHAT).encode(), is_last=False), said(request_trailers={}))
    answers = [await conversation.answer() for _ in range(3)]
    assert [answer.WhichOneof("response") for answer in answers] == [
        "request_headers",
        "request_body",
        "request_trailers",
    ]
    assert heard(answers[:2]).endpoint
    await conversation.end()


async def test_what_computes_nothing_goes_to_any_endpoint(picker: RunningPicker) -> None:
    seen = set()
    for _ in range(4):
        conversation = picker.gateway.open()
        await conversation.say(head("/v1/models?x=1", method="GET", has_body=False))
        seen.add(heard([await conversation.answer()]).endpoint)
        await conversation.end()
    assert seen == set(ENDPOINTS.values())


async def test_a_body_our_parser_refuses_is_placed_by_its_length(picker: RunningPicker) -> None:
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    picked = await picker.gateway.pick({"model": "tiny", "messages": [{"role": "user", "content": picture}]})
    assert picked.worker in ENDPOINTS


async def test_encoded_bodies_are_read_and_pass_as_they_are(picker: RunningPicker) -> None:
    data = gzip.compress(json.dumps(STORY).encode())
    first = await picker.gateway.serve(data, headers={"content-encoding": "gzip"})
    assert first.body == data
    again = [await picker.gateway.serve(STORY) for _ in range(3)]
    assert {one.worker for one in again} == {first.worker}


async def test_a_renamed_body_loses_its_encoding(picker: RunningPicker) -> None:
    headers = {"content-encoding": "gzip", "x-gateway-model-name-rewrite": "tiny"}
    picked = await picker.gateway.pick(gzip.compress(json.dumps(CHAT | {"model": "public"}).encode()), headers=headers)
    assert json.loads(picked.body) == CHAT
    assert "content-encoding" in picked.removed


@pytest.mark.parametrize(("encoding", "body", "status"), [("br", b"x", 415), ("gzip", b"no gzip", 400)])
async def test_an_encoding_that_cannot_be_undone_is_refused(
    picker: RunningPicker, encoding: str, body: bytes, status: int
) -> None:
    assert (await picker.gateway.pick(body, headers={"content-encoding": encoding})).status == status


async def test_picks_are_counted_by_their_outcome(picker: RunningPicker) -> None:
    await picker.gateway.serve()
    await picker.gateway.pick(CHAT | {"model": "none"})
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"{picker.url}/metrics")).text
    found = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    counts = {(one.name, one.labels.get("outcome")): one.value for one in found}
    assert counts["kvmesh_picker_requests_total", "ok"] >= 1
    assert counts["kvmesh_picker_requests_total", "model_not_found"] >= 1
    assert counts["kvmesh_picker_endpoints", None] == 2
    assert counts["kvmesh_picker_streams", None] == 0


# --- subsets -------------------------------------------------------------------------------------------


async def test_only_endpoints_of_the_subset_are_picked(picker: RunningPicker) -> None:
    picked = [await picker.gateway.pick(subset=["10.0.0.2:8000", "10.0.0.9:1"]) for _ in range(4)]
    assert {one.endpoint for one in picked} == {"10.0.0.2:8000"}


@pytest.mark.parametrize("subset", [[], ["10.0.0.9:1"], ["no address"]])
async def test_a_subset_without_a_worker_is_a_503(picker: RunningPicker, subset: list[str]) -> None:
    picked = await picker.gateway.pick(subset=subset)
    assert (picked.status, picked.refusal["error"]["code"]) == (503, "no_worker")


# --- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field", ["kv_transfer_params", "ec_transfer_params", "disaggregated_params", "bootstrap_room"]
)
async def test_what_engines_say_to_each_other_is_refused_from_a_client(picker: RunningPicker, field: str) -> None:
    forged = {"do_remote_prefill": True, "remote_host": "10.0.0.66", "remote_port": 1, "tp_size": 2**31}
    picked = await picker.gateway.pick(CHAT | {field: forged})
    assert (picked.status, picked.refusal["error"]["param"]) == (400, field)
    assert (await picker.gateway.pick(CHAT | {field: None})).worker in ENDPOINTS


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (CHAT_PATH, b"{", 400, "not valid JSON"),
        (CHAT_PATH, b"[]", 400, ""),
        (CHAT_PATH, {"messages": []}, 400, "model"),
        (CHAT_PATH, CHAT | {"model": "none"}, 404, "does not exist"),
        (
            CHAT_PATH,
            {"model": "tiny", "messages": [{"role": "user", "content": "word " * 5000}]},
            400,
            "context length",
        ),
        ("/v1/embeddings", {"model": "none", "input": "x"}, 404, "does not exist"),
    ],
)
async def test_bad_requests_get_openais_error(
    picker: RunningPicker, path: str, body: object, status: int, says: str
) -> None:
    picked = await picker.gateway.pick(body, path)
    assert picked.status == status
    assert picked.refusal["error"]["type"] == "invalid_request_error"
    assert says in picked.refusal["error"]["message"]


async def test_anthropics_clients_get_anthropics_error(picker: RunningPicker) -> None:
    picked = await picker.gateway.pick({"model": "none", "max_tokens": 5, "messages": []}, "/v1/messages")
    assert picked.status == 404
    assert picked.refusal["type"] == "error"


async def test_without_workers_the_answer_is_a_503(tmp_path: Path, model_folder: Path) -> None:
    async with running(tmp_path, model_folder) as picker:
        picked = await picker.gateway.pick()
        assert (picked.status, picked.retry_after) == (503, "2")
        assert not await picker.gateway.is_serving("readiness")


async def test_a_worker_without_endpoint_is_named_in_health(tmp_path: Path, model_folder: Path) -> None:
    async with running(tmp_path, model_folder) as picker:
        await picker.join("w1", "")
        await picker.join("w2", "a-name:8000")

        async def both_are_told() -> bool:
            return len((await picker.health())["discovery"]["ignored"]) == 2

        await picker.until(both_are_told)
        assert "--http-endpoint" in json.dumps(await picker.health())


async def test_bodies_are_bounded(tmp_path: Path, model_folder: Path) -> None:
    async with running(tmp_path, model_folder, ext_proc_max_body_mib=0.01) as picker:
        picked = await picker.gateway.pick({"model": "tiny", "prompt": "x" * 20_000}, "/v1/completions")
        assert picked.status == 413


async def test_open_requests_are_bounded(tmp_path: Path, model_folder: Path) -> None:
    async with running(tmp_path, model_folder, ext_proc_max_streams=1) as picker:
        await picker.join("w1", "10.0.0.1:8000")
        await picker.until_known("w1")
        held = picker.gateway.open()
        assert (await held.pick()).worker == "w1"
        assert (await picker.gateway.pick()).status == 429
        await held.end()
        assert (await picker.gateway.pick()).worker == "w1"


async def test_a_gateway_that_cannot_work_is_told_why(picker: RunningPicker) -> None:
    conversation = picker.gateway.open()
    await conversation.say(head(modes=(1, 0)))  # type: ignore[arg-type]
    picked = heard([await conversation.answer()])
    assert picked.status == 500
    assert "STREAMED" in picked.refusal["error"]["message"] and "BUFFERED" in picked.refusal["error"]["message"]


# --- load and the queue --------------------------------------------------------------------------------


@pytest.fixture
async def small(request: pytest.FixtureRequest, tmp_path: Path, model_folder: Path):
    """A picker whose two workers run few requests at once."""
    wait_s = getattr(request, "param", 0.5)
    settings = {"saturation_requests_share": 1.0, "saturation_tokens": 0, "ramp_s": 0.0, "ext_proc_wait_s": wait_s}
    async with running(tmp_path, model_folder, **settings, ext_proc_objectives="batch=-1,live=50") as found:
        await found.join("w1", "10.0.0.1:8000", max_num_seqs=1)
        await found.join("w2", "10.0.0.2:8000", max_num_seqs=1)
        await found.until_known("w1", "w2")
        yield found


async def full(picker: RunningPicker) -> list:
    held = [picker.gateway.open() for _ in range(2)]
    assert {(await one.pick()).worker for one in held} == {"w1", "w2"}
    return held


async def test_a_request_that_finds_no_room_in_time_gets_a_429(small: RunningPicker) -> None:
    held = await full(small)
    picked = await small.gateway.pick()
    assert (picked.status, picked.refusal["error"]["code"]) == (429, "overloaded")
    assert int(picked.retry_after or 0) >= 1
    for one in held:
        await one.end()


async def test_a_waiting_request_gets_the_room_of_one_that_ends(small: RunningPicker) -> None:
    held = await full(small)
    conversation = small.gateway.open()
    waiting = asyncio.create_task(conversation.pick(modes=(BUFFERED, NONE)))

    async def one_waits() -> bool:
        return (await small.health())["waiting"] == 1

    await small.until(one_waits)
    await asyncio.sleep(0.1)
    await held[0].end()
    assert (await asyncio.wait_for(waiting, PATIENCE_S)).worker
    assert conversation.more_time_s > 0  # Envoy would give up after 0.2 s
    await conversation.end()
    await held[1].end()


@pytest.mark.parametrize("small", [WITHOUT_S], indirect=True)
async def test_a_sheddable_request_does_not_wait(small: RunningPicker) -> None:
    held = await full(small)
    began = asyncio.get_running_loop().time()
    picked = await small.gateway.pick(headers={"x-gateway-inference-objective": "batch"})
    assert picked.status == 429
    assert asyncio.get_running_loop().time() - began < RECOVERED_S
    for one in held:
        await one.end()


async def test_a_client_that_leaves_the_queue_takes_no_room(small: RunningPicker) -> None:
    held = await full(small)
    leaving = small.gateway.open()
    await leaving.say(head(), body_said(json.dumps(CHAT).encode()))

    async def one_waits() -> bool:
        return (await small.health())["waiting"] == 1

    await small.until(one_waits)
    await leaving.end()
    assert (await small.health())["waiting"] == 0
    for one in held:
        await one.end()
    assert await small.in_flight() == 0


async def test_load_counts_until_the_answer_has_ended(picker: RunningPicker) -> None:
    conversation = picker.gateway.open()
    await conversation.pick()
    assert await picker.in_flight() == 1
    answers = await conversation.respond(b"data: a\n\n", b"data: b\n\n")
    sent = [answer.response_body.response.body_mutation.streamed_response.body for answer in answers[1:]]
    assert sent == [b"data: a\n\n", b"data: b\n\n"]
    await conversation.end()
    assert await picker.in_flight() == 0


async def test_the_length_of_an_answer_is_known_when_it_ends(
    picker: RunningPicker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router measures the gap between tokens with it: the reports before may be half a minute old."""
    told: list[int | str] = []
    progress, end = LocalBooking.progress, LocalBooking.end

    def note_progress(booking: LocalBooking, osl_tokens: int | None = None) -> None:
        told.append(osl_tokens or 0)
        progress(booking, osl_tokens)

    def note_end(booking: LocalBooking, *, ok: bool) -> None:
        told.append("end")
        end(booking, ok=ok)

    monkeypatch.setattr(LocalBooking, "progress", note_progress)
    monkeypatch.setattr(LocalBooking, "end", note_end)
    conversation = picker.gateway.open()
    await conversation.pick()
    await conversation.respond(b"data: a\n\n", b"data: b\n\n", b"data: c\n\n")
    await conversation.end()
    assert told == [3, "end"]


async def test_a_gateway_that_breaks_off_frees_the_load(picker: RunningPicker) -> None:
    conversation = picker.gateway.open()
    await conversation.pick()
    conversation.stream.cancel()

    async def is_idle() -> bool:
        return await picker.in_flight() == 0

    await picker.until(is_idle)


async def test_a_gateway_that_hides_the_answer_is_counted(picker: RunningPicker) -> None:
    before = UNSEEN.value
    await picker.gateway.pick(modes=(DUPLEX, NONE))
    assert UNSEEN.value == before + 1


# --- life ----------------------------------------------------------------------------------------------


async def test_health_says_whether_requests_may_come(picker: RunningPicker) -> None:
    for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        assert await picker.gateway.is_serving(service)


async def test_a_picker_that_stops_lets_open_requests_end(tmp_path: Path, model_folder: Path) -> None:
    async with running(tmp_path, model_folder, drain_timeout_s=PATIENCE_S) as picker:
        await picker.join("w1", "10.0.0.1:8000")
        await picker.until_known("w1")
        conversation = picker.gateway.open()
        assert (await conversation.pick()).worker == "w1"
        picker.stop.set()
        assert len(await conversation.respond(b"data: a\n\n", b"data: b\n\n")) == 3
        await conversation.end()


async def test_workers_that_leave_are_not_picked(picker: RunningPicker) -> None:
    await picker.leave("w1")
    await picker.until_known("w2")
    picked: list[Picked] = [await picker.gateway.pick() for _ in range(3)]
    assert {one.worker for one in picked} == {"w2"}


async def test_pickers_tell_each_other_of_their_load(tmp_path: Path, model_folder: Path) -> None:
    settings = {"gossip": True, "ramp_s": 0.0}
    async with (
        running(tmp_path, model_folder, name="one", **settings) as one,
        running(tmp_path, model_folder, name="two", **settings) as two,
    ):
        await one.join("w1", "10.0.0.1:8000")
        await one.join("w2", "10.0.0.2:8000")
        for found in (one, two):
            await found.until_known("w1", "w2")
        held = one.gateway.open()
        first = await held.pick(STORY)

        async def the_other_knows() -> bool:
            return (await two.gateway.pick(OTHER)).worker != first.worker

        await two.until(the_other_knows)
        assert {(await two.gateway.pick(OTHER)).worker for _ in range(4)} == {"w1", "w2"} - {first.worker}
        await held.end()
