"""Embeddings over real sockets: what workers are asked, what clients get, what is refused."""

import asyncio
import base64
from array import array
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from prometheus_client import REGISTRY

from kvmesh.frontend.openai.embeddings import INPUTS_AT_ONCE, MAX_INPUTS
from kvmesh.protocol.errors import EngineError, NoWorkerError, OverloadedError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Feature, unpack_tokens
from tests.frontend.serving import BACKEND, Served, able_card, ids, serving
from tests.support.counted import counted_in
from tests.support.generator import vector_of
from tests.support.patience import PATIENCE_S

PATH = "/v1/embeddings"
ASKED: dict[str, Any] = {"model": "tiny", "input": "the fox"}
BOS = BACKEND.token_to_id("<s>")


def floats(data: bytes) -> list[float]:
    return array("f", data).tolist()


def asked(served: Served) -> list[list[int]]:
    return [unpack_tokens(request.prompt) for request in served.generator.embed_requests]


# --- inputs -------------------------------------------------------------------------------------------


async def test_a_text_becomes_a_vector(able: Served) -> None:
    status, _, body = await able.post(PATH, ASKED)
    [request] = able.generator.embed_requests
    assert asked(able) == [[BOS, *ids("the fox")]]
    assert (status, body) == (
        200,
        {
            "object": "list",
            "model": "tiny",
            "data": [{"object": "embedding", "index": 0, "embedding": floats(vector_of(request))}],
            "usage": {"prompt_tokens": len(asked(able)[0]), "total_tokens": len(asked(able)[0])},
        },
    )


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("a", [[BOS, *ids("a")]]),
        (["a", "the fox"], [[BOS, *ids("a")], [BOS, *ids("the fox")]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["a", [5]], [[BOS, *ids("a")], [5]]),
        ([""], [[BOS]]),
    ],
    ids=str,
)
async def test_inputs_are_texts_or_token_ids_one_or_several(able: Served, given: Any, tokens: list[list[int]]) -> None:
    _, _, body = await able.post(PATH, ASKED | {"input": given})
    assert asked(able) == tokens
    assert [entry["index"] for entry in body["data"]] == list(range(len(tokens)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, tokens))


async def test_vectors_come_in_the_order_of_the_inputs(able: Served) -> None:
    gate = asyncio.Event()
    able.generator.embed_script = [gate]  # the first waits for the second
    running = asyncio.create_task(able.post(PATH, ASKED | {"input": [[5], [6, 7]]}))
    async with asyncio.timeout(PATIENCE_S):
        while len(able.generator.embed_requests) < 2:
            await asyncio.sleep(0)
        gate.set()
        _, _, body = await running
    expected = [floats(vector_of(request)) for request in able.generator.embed_requests]
    assert [entry["embedding"] for entry in body["data"]] == expected


async def test_each_input_is_a_request_of_its_own(able: Served) -> None:
    body = ASKED | {"input": ["a", "b"], "user": "me", "cache_salt": "s"}
    await able.post(PATH, body, x_request_id="mine", x_kvmesh_priority="5")
    first, second = able.generator.embed_requests
    assert first.request_id != second.request_id
    assert "-mine-" in first.request_id
    assert {request.cache_salt for request in (first, second)} == {"s"}
    assert {(hints.session, hints.priority, hints.disaggregate) for hints in able.generator.hints} == {("me", 5, False)}


async def test_not_all_inputs_are_asked_at_once(able: Served) -> None:
    gates = [asyncio.Event() for _ in range(INPUTS_AT_ONCE)]
    able.generator.embed_script = list(gates)
    running = asyncio.create_task(able.post(PATH, ASKED | {"input": [[5]] * (INPUTS_AT_ONCE + 5)}))
    async with asyncio.timeout(PATIENCE_S):
        while len(able.generator.embed_requests) < INPUTS_AT_ONCE:
            await asyncio.sleep(0)
        assert (await able.get("/live"))[0] == 200  # a round trip, in which more could have begun
        assert len(able.generator.embed_requests) == INPUTS_AT_ONCE
        for gate in gates:
            gate.set()
        _, _, body = await running
    assert len(body["data"]) == INPUTS_AT_ONCE + 5


# --- formats ------------------------------------------------------------------------------------------


async def test_base64_is_the_same_vector(able: Served) -> None:
    _, _, as_floats = await able.post(PATH, ASKED | {"encoding_format": "float"})
    _, _, encoded = await able.post(PATH, ASKED | {"encoding_format": "base64"})
    [entry] = encoded["data"]
    assert floats(base64.b64decode(entry["embedding"])) == as_floats["data"][0]["embedding"]
    assert as_floats["data"] == (await able.post(PATH, ASKED | {"encoding_format": None}))[2]["data"]


async def test_dimensions_are_those_of_the_model_or_refused(able: Served) -> None:
    assert (await able.post(PATH, ASKED | {"dimensions": 2}))[0] == 200
    for dimensions in (1, 3):
        status, _, body = await able.post(PATH, ASKED | {"dimensions": dimensions})
        assert (status, body["error"]["param"]) == (400, "dimensions")
        assert f"is {dimensions}, and this model's vectors have 2; leave it out" in body["error"]["message"]


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [[5, 2**32]]}, "input[0][1]"),
        ({"input": [10**6]}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": None}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [5] * 4097}, "input"),
        ({"input": "fox " * 50_000}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "2"}, "dimensions"),
        ({"user": 7}, "user"),
        ({"truncate": True}, "truncate"),
        ({"model": ""}, "model"),
    ],
    ids=lambda value: str(value)[:32],
)
async def test_bad_requests_are_refused_by_name(able: Served, fields: dict[str, Any], param: str) -> None:
    status, _, body = await able.post(PATH, ASKED | fields)
    assert (status, body["error"]["param"], body["error"]["type"]) == (400, param, "invalid_request_error"), body
    assert able.generator.embed_requests == []
    assert able.admission.inflight == 0


async def test_an_input_may_fill_the_context(able: Served) -> None:
    assert (await able.post(PATH, ASKED | {"input": [5] * 4096}))[0] == 200
    _, _, body = await able.post(PATH, ASKED | {"input": [[5], [5] * 4097]})
    assert body["error"]["code"] == "context_length_exceeded"
    assert "4097" in body["error"]["message"]


async def test_a_model_that_is_not_served_is_not_found(able: Served) -> None:
    status, _, body = await able.post(PATH, ASKED | {"model": "gpt"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")


async def test_where_no_worker_computes_embeddings_the_model_is_refused(able_folder: Path) -> None:
    features = tuple(feature for feature in Feature if feature is not Feature.EMBEDDINGS)
    async with serving(able_card(able_folder, features=features)) as served:
        status, _, body = await served.post(PATH, ASKED)
        assert (status, body["error"]["param"]) == (400, "model")
        assert "the workers of 'tiny' compute no embeddings" in body["error"]["message"]
        served.models.add(able_card(able_folder, worker_id=WorkerId("other"), model="other"))
        assert (await served.post(PATH, ASKED | {"model": "other"}))[0] == 200


async def test_without_a_worker_it_is_worth_coming_back(able: Served) -> None:
    able.models.remove(WorkerId("w"))
    status, headers, body = await able.post(PATH, ASKED)
    assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "no_worker", "2")


# --- failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NoWorkerError("none"), 503, "no_worker"),
        (OverloadedError("full"), 429, "overloaded"),
        (EngineError("broken"), 502, "engine"),
        (RuntimeError("a bug"), 500, "internal"),
    ],
    ids=lambda value: str(value)[:12],
)
async def test_one_input_that_fails_fails_all_and_cancels_the_others(
    able: Served, error: BaseException, status: int, code: str
) -> None:
    able.generator.embed_script = [asyncio.Event(), error]
    got, _, body = await able.post(PATH, ASKED | {"input": ["a", "b"]})
    assert (got, body["error"]["code"]) == (status, code)
    assert "a bug" not in body["error"]["message"]
    assert able.generator.cancelled == [able.generator.embed_requests[0].request_id]
    assert able.admission.inflight == 0


@pytest.mark.parametrize("vector", [b"", b"abc", array("f", [float("nan"), 0.0]).tobytes()], ids=repr)
async def test_vectors_that_are_none_are_the_engines_failure(able: Served, vector: bytes) -> None:
    able.generator.embed_script = [vector]
    status, _, body = await able.post(PATH, ASKED)
    assert (status, body["error"]["code"]) == (502, "engine")


async def test_vectors_of_one_reply_have_one_length(able: Served) -> None:
    able.generator.embed_script = [array("f", [1.0]).tobytes()]
    status, _, body = await able.post(PATH, ASKED | {"input": ["a", "b"]})
    assert (status, body["error"]["code"]) == (502, "engine")


async def test_the_clients_timeout_ends_the_request(able: Served) -> None:
    able.generator.embed_script = [asyncio.Event()]
    status, _, body = await able.post(PATH, ASKED, x_request_timeout_s="0.05")
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    assert able.generator.cancelled == [able.generator.embed_requests[0].request_id]


async def test_a_client_that_leaves_cancels_its_request(able: Served) -> None:
    able.generator.embed_script = [asyncio.Event()]
    async with aiohttp.ClientSession() as leaving:
        post = asyncio.create_task(leaving.post(able.url + PATH, json=ASKED))
        async with asyncio.timeout(PATIENCE_S):
            await able.generator.started.wait()
            post.cancel()
            await asyncio.wait({post})
    async with asyncio.timeout(PATIENCE_S):
        await able.generator.ended.wait()
        await able.admission.wait_idle()
    assert able.generator.cancelled == [able.generator.embed_requests[0].request_id]


async def test_request_ids_go_in_and_out(able: Served) -> None:
    for body in (ASKED | {"input": []}, ASKED):
        _, headers, _ = await able.post(PATH, body, x_request_id="my-1.x_Y")
        assert headers["x-request-id"] == "my-1.x_Y"
        _, headers, _ = await able.post(PATH, body)
        assert headers["x-request-id"].startswith("embd-")
    assert able.generator.embed_requests[-1].request_id == f"{headers['x-request-id']}-0"


def counted(outcome: str) -> float:
    return counted_in(REGISTRY, "kvmesh_frontend_requests_total", endpoint="embeddings", outcome=outcome)


async def test_metrics_count_by_outcome(able: Served) -> None:
    before = {outcome: counted(outcome) for outcome in ("ok", "invalid_request", "engine", "internal")}
    await able.post(PATH, ASKED)
    await able.post(PATH, ASKED | {"input": []})
    for error in (EngineError("broken"), RuntimeError("a bug")):
        able.generator.embed_script = [error]
        await able.post(PATH, ASKED)
    assert {outcome: counted(outcome) - n for outcome, n in before.items()} == dict.fromkeys(before, 1.0)


# --- the official client ------------------------------------------------------------------------------


async def test_the_official_client(able: Served) -> None:
    async with able.openai() as client:
        default = await client.embeddings.create(model="tiny", input=["a", "the fox"])  # it asks for base64
        plain = await client.embeddings.create(model="tiny", input=["a", "the fox"], encoding_format="float")
        assert [entry.embedding for entry in default.data] == [entry.embedding for entry in plain.data]
        assert default.usage == plain.usage
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            await client.embeddings.create(model="tiny", input="a", dimensions=7)
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="gpt", input="a")
