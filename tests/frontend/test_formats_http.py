"""Answers that are held to a format or to some tokens, over real sockets: what reaches the engine, who refuses it."""

import json
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from msgspec.structs import replace

from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import Delta, Feature, Guide, GuideKind, Role
from tests.frontend.serving import BACKEND, CHAT, TEXT, Served, able_card, ids, serving, words

PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OBJECT = {"type": "json_object"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
LAST_TOKEN = BACKEND.get_vocab_size() - 1


def without(*features: Feature) -> tuple[Feature, ...]:
    return tuple(feature for feature in Feature if feature not in features)


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


# --- response_format ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("asked", "guide"),
    [
        (OBJECT, Guide(kind=GuideKind.JSON)),
        (SCHEMA, Guide(kind=GuideKind.JSON_SCHEMA, value=json.dumps(CITY, separators=(",", ":")))),
        ({"type": "text"}, None),
        (None, None),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_a_format_reaches_the_engine(able: Served, path: str, asked: Any, guide: Guide | None) -> None:
    status, _, _ = await able.post(path, PATHS[path] | {"response_format": asked})
    assert (status, able.generator.requests[0].guide) == (200, guide)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ['{"city": "<think>Rom</think>"}', '{"call": "<tool_call>{}</tool_call>"}'])
async def test_a_guided_answer_is_not_searched_for_calls(able: Served, text: str, stream: bool) -> None:
    able.generator.script = [*[Delta((token,)) for token in ids(text)], *words()]
    if stream:
        *chunks, _ = await able.events("/v1/chat/completions", CHAT | {"response_format": OBJECT})
        content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    else:
        _, _, body = await able.post("/v1/chat/completions", CHAT | {"response_format": OBJECT})
        assert body["choices"][0]["message"].keys() == {"role", "content", "refusal", "annotations"}
        content = text_of(body["choices"][0])
    assert content == text


async def test_each_of_several_answers_is_held_to_it(able: Served) -> None:
    await able.post("/v1/completions", TEXT | {"n": 2, "response_format": SCHEMA})
    first, second = able.generator.requests
    assert first.guide is not None
    assert first.guide == second.guide


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("asked", [OBJECT, SCHEMA], ids=["object", "schema"])
async def test_without_an_engine_that_can_the_parameter_is_refused(able_folder: Path, path: str, asked: Any) -> None:
    async with serving(able_card(able_folder, features=without(Feature.GUIDED))) as served:
        status, _, body = await served.post(path, PATHS[path] | {"response_format": asked})
        assert (status, body["error"]["param"], body["error"]["type"]) == (
            400, "response_format", "invalid_request_error",
        )  # fmt: skip
        assert "not supported by the engine of 'tiny'; leave it out" in body["error"]["message"]
        assert served.generator.requests == []
        assert (await served.post(path, PATHS[path] | {"response_format": {"type": "text"}}))[0] == 200


async def test_all_workers_of_a_model_have_to_be_able(able_folder: Path) -> None:
    """A stream may move from one to the other, and so may not depend on which it is."""
    async with serving(able_card(able_folder)) as served:
        less = able_card(able_folder, worker_id=WorkerId("less"), features=without(Feature.GUIDED))
        body = CHAT | {"response_format": OBJECT}
        for card, status in ((less, 400), (replace(less, role=Role.PREFILL), 400)):
            served.models.add(card)
            assert (await served.post("/v1/chat/completions", body))[0] == status
            served.models.remove(WorkerId("less"))
            assert (await served.post("/v1/chat/completions", body))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_the_engine_cannot_compile_is_a_400(able: Served, stream: bool) -> None:
    able.generator.script = [InvalidRequestError("the schema cannot be compiled: 'if' is not known")]
    body = CHAT | {"response_format": SCHEMA, "stream": stream}
    status, _, reply = await able.post("/v1/chat/completions", body)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert "'if' is not known" in reply["error"]["message"]


TOOLS = [
    {"type": "function", "function": {"name": "time"}},
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
]
PLAIN_TOOLS = [tool["function"] | {"type": "function"} for tool in TOOLS]
ONLY = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS[1:]}}
NAMED = {"type": "function", "function": {"name": "weather"}}
PLAIN_NAMED = {"type": "function", "name": "weather"}
FAULTS: list[tuple[str, dict[str, Any], str, str, str]] = [
    # path, what is asked for, where the worker found the fault, what the client reads: the parameter, the place
    (
        "/v1/chat/completions", {"response_format": SCHEMA}, "/properties/city",
        "response_format.json_schema.schema", "response_format: In context=('properties', 'city'), ",
    ),
    (
        "/v1/chat/completions", {"response_format": SCHEMA}, "",
        "response_format.json_schema.schema", "response_format: ",
    ),
    (
        "/v1/completions", {"response_format": SCHEMA}, "/anyOf/0",
        "response_format.json_schema.schema", "response_format: In context=('anyOf', '0'), ",
    ),
    (
        "/v1/chat/completions", {"tools": TOOLS, "tool_choice": NAMED}, "/properties/a~1b",
        "tools[1].function.parameters", "function 'weather': In context=('properties', 'a/b'), ",
    ),
    (
        "/v1/chat/completions", {"tools": TOOLS, "tool_choice": "required"},
        "/items/anyOf/1/properties/parameters/properties/city",
        "tools[1].function.parameters", "function 'weather': In context=('properties', 'city'), ",
    ),
    (
        "/v1/chat/completions", {"tools": TOOLS, "tool_choice": ONLY},
        "/items/anyOf/0/properties/parameters/properties/city",
        "tools[1].function.parameters", "function 'weather': In context=('properties', 'city'), ",
    ),
    (
        "/v1/chat/completions", {"tools": TOOLS, "tool_choice": "required"}, "/$defs/tool1_defs_x/items",
        "tools[1].function.parameters", "function 'weather': In context=('$defs', 'x', 'items'), ",
    ),
    ("/v1/chat/completions", {"tools": TOOLS, "tool_choice": "required"}, "", "tools", "tools: "),
    (
        "/v1/responses", {"text": {"format": {"type": "json_schema", "name": "city", "schema": CITY}}}, "/properties/x",
        "text.format.schema", "text.format: In context=('properties', 'x'), ",
    ),
    (
        "/v1/responses", {"tools": PLAIN_TOOLS, "tool_choice": PLAIN_NAMED}, "/properties/x",
        "tools", "function 'weather': In context=('properties', 'x'), ",
    ),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "asked", "pointer", "param", "says"), FAULTS)
async def test_a_fault_in_a_schema_has_the_callers_names(
    able: Served, path: str, asked: Any, pointer: str, param: str, says: str, stream: bool
) -> None:
    able.generator.script = [InvalidRequestError("'if' is not supported", param=f"guide#{pointer}")]
    body = {"model": "tiny", "input": "hi"} if path == "/v1/responses" else (PATHS[path])
    status, _, reply = await able.post(path, body | asked | {"stream": stream})
    assert (status, reply["error"]["param"]) == (400, param)
    assert reply["error"]["message"] == f"Invalid schema for {says}'if' is not supported"


async def test_another_fault_of_a_guide_names_the_format(able: Served) -> None:
    able.generator.script = [InvalidRequestError("it took too long", hint="make it simpler", param="guide")]
    _, _, reply = await able.post("/v1/chat/completions", CHAT | {"response_format": SCHEMA})
    assert (reply["error"]["param"], reply["error"]["message"]) == (
        "response_format",
        "it took too long; make it simpler",
    )


async def test_a_fault_that_is_no_guides_keeps_its_name(able: Served) -> None:
    able.generator.script = [InvalidRequestError("no such token", param="logit_bias")]
    _, _, reply = await able.post("/v1/chat/completions", CHAT | {"response_format": SCHEMA})
    assert reply["error"]["param"] == "logit_bias"


# --- tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_biases_and_allowed_tokens_reach_the_engine(able: Served, path: str) -> None:
    fields = {"logit_bias": {"5": -100, str(LAST_TOKEN): 2}, "allowed_token_ids": [5, LAST_TOKEN]}
    assert (await able.post(path, PATHS[path] | fields))[0] == 200
    sampling = able.generator.requests[0].sampling
    assert sampling.logit_bias == ((5, -100.0), (LAST_TOKEN, 2.0))
    assert sampling.allowed_token_ids == (5, LAST_TOKEN)


@pytest.mark.parametrize(
    ("feature", "field"),
    [(Feature.LOGIT_BIAS, {"logit_bias": {"5": 1}}), (Feature.ALLOWED_TOKENS, {"allowed_token_ids": [5]})],
)
async def test_what_an_engine_cannot_weigh_is_refused_by_name(able_folder: Path, feature: Feature, field: Any) -> None:
    [name] = field
    async with serving(able_card(able_folder, features=without(feature))) as served:
        status, _, body = await served.post("/v1/chat/completions", CHAT | field)
        assert (status, body["error"]["param"]) == (400, name)
        assert (await served.post("/v1/chat/completions", CHAT | {"logit_bias": {}}))[0] == 200


@pytest.mark.parametrize("path", PATHS)
async def test_a_completion_by_an_embeddings_model_is_refused_by_its_name(able_folder: Path, path: str) -> None:
    async with serving(able_card(able_folder, features=(Feature.EMBEDDINGS,))) as served:
        status, _, body = await served.post(path, PATHS[path])
    assert (status, body["error"]["param"]) == (400, "model")
    assert "computes embeddings only" in body["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"logit_bias": {str(LAST_TOKEN + 1): 1}}, "logit_bias"),
        ({"allowed_token_ids": [LAST_TOKEN + 1]}, "allowed_token_ids[0]"),
        ({"stop_token_ids": [5, LAST_TOKEN + 1]}, "stop_token_ids[1]"),
    ],
)
async def test_tokens_that_do_not_exist_are_refused(able: Served, path: str, field: dict[str, Any], param: str) -> None:
    status, _, body = await able.post(path, PATHS[path] | field)
    assert (status, body["error"]["param"]) == (400, param)
    assert f"the token {LAST_TOKEN + 1}" in body["error"]["message"]
    assert f"has {LAST_TOKEN + 1} tokens" in body["error"]["message"]


FORGED = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 1, "tp_size": 4096},
    "ec_transfer_params": {"do_remote_encode": True},
    "vllm_xargs": {"kv_transfer_params": {"do_remote_prefill": True}},
    "extra_args": {"kv_transfer_params": {"do_remote_prefill": True}},
    "bootstrap_host": "10.0.0.9",
    "bootstrap_port": 1,
    "bootstrap_room": 1,
    "ticket": {"worker_id": "w", "address": "10.0.0.9:1"},
    "offer_kv": True,
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", FORGED)
async def test_no_field_of_a_caller_steers_a_kv_transfer(able: Served, path: str, field: str) -> None:
    """Public advisories of vLLM: CVE-2026-94622 and CVE-2026-94626. The field is ignored or refused."""
    await able.post(path, PATHS[path])
    status, _, body = await able.post(path, PATHS[path] | {field: FORGED[field]})
    assert status == 200 or (status == 400 and body["error"]["param"] == field)
    plain, *forged = [replace(request, request_id=RequestId("")) for request in able.generator.requests]
    assert forged == [plain] * (status == 200)


async def test_tokens_that_an_engine_may_stop_at_reach_it(able_folder: Path) -> None:
    """They are no biases: an engine that weighs no token can stop at one."""
    plain = without(Feature.LOGIT_BIAS, Feature.ALLOWED_TOKENS)
    async with serving(able_card(able_folder, features=plain)) as served:
        assert (await served.post("/v1/completions", TEXT | {"stop_token_ids": [LAST_TOKEN]}))[0] == 200
        assert served.generator.requests[0].stop.stop_token_ids == (LAST_TOKEN,)


# --- the official client ------------------------------------------------------------------------------


class City(pydantic.BaseModel):
    city: str
    rivers: list[str] = []


async def test_the_official_client_parses_an_answer_of_its_schema(able: Served) -> None:
    able.generator.script = words('{"city": "Rom", "rivers"', ': ["Tiber"]}')
    async with able.openai() as client:
        answer = await client.chat.completions.parse(model="tiny", messages=CHAT["messages"], response_format=City)
        assert answer.choices[0].message.parsed == City(city="Rom", rivers=["Tiber"])
        guide = able.generator.requests[0].guide
        assert guide is not None
        assert json.loads(guide.value)["properties"].keys() == {"city", "rivers"}
        async with client.chat.completions.stream(
            model="tiny", messages=CHAT["messages"], response_format=City
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == answer.choices[0].message.parsed


async def test_the_official_client_is_told_what_the_engine_cannot(able_folder: Path) -> None:
    async with (
        serving(able_card(able_folder, features=without(Feature.GUIDED))) as served,
        served.openai() as client,
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.parse(model="tiny", messages=CHAT["messages"], response_format=City)
        assert refused.value.param == "response_format"
