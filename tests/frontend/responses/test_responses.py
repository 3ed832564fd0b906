"""POST /v1/responses over real sockets: what clients see, the official one among them."""

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest
from msgspec.structs import replace

from kvmesh.frontend.generator import Hints, Trace
from kvmesh.protocol.errors import DeadlineExceededError, EngineError, MeshError, OverloadedError, PeerLostError
from kvmesh.protocol.messages import Delta, FinishReason, GuideKind, TokenLogprob, unpack_tokens
from tests.frontend import tiny
from tests.frontend.responses.serving import (
    ASKED,
    WEATHER,
    Served,
    calling,
    checked,
    ids,
    put_together,
    words,
)
from tests.support.patience import PATIENCE_S

THOUGHT = "<think>\nHm.\n</think>\n\n"


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


# --- whole answers ------------------------------------------------------------------------------------


async def test_a_whole_answer(served: Served) -> None:
    def trace(trace: Trace) -> None:
        trace.cached_tokens = 4

    served.generator.script.insert(0, trace)
    body = await served.whole()
    request = served.generator.requests[0]
    assert served.prompt() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    isl = len(unpack_tokens(request.prompt))
    osl = sum(len(ids(text)) for text in ("Once", " upon", " a time")) + 1
    [message] = body["output"]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Once upon a time", "annotations": [], "logprobs": []}],
    }
    assert body["completed_at"] >= body["created_at"]
    assert body == {
        "id": request.request_id.replace("resp-", "resp_"),
        "object": "response",
        "created_at": body["created_at"],
        "completed_at": body["completed_at"],
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "model": "tiny",
        "output": body["output"],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": isl,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": osl,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": isl + osl,
        },
        "user": None,
    }


async def test_an_answer_repeats_the_settings_of_its_request(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked: dict[str, Any] = {
        "instructions": "Be brief.", "max_output_tokens": 9, "max_tool_calls": 3, "metadata": {"a": "b"},
        "parallel_tool_calls": False, "prompt_cache_key": "k", "safety_identifier": "s", "user": "me",
        "temperature": 0.5, "top_p": 0.25, "tools": [WEATHER], "tool_choice": "none",
        "include": ["message.output_text.logprobs"], "top_logprobs": 2,
    }  # fmt: skip
    text = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True, "description": "of all"}
    body = await served.whole(**asked, text={"format": text}, reasoning={"effort": "low"}, store=True)
    del asked["include"]
    assert {name: body[name] for name in asked} == asked
    assert body["text"] == {"format": text, "verbosity": "medium"}
    assert body["reasoning"] == {"effort": "low", "summary": None}
    assert (body["store"], body["truncation"]) == (False, "disabled"), "nothing is stored, whatever was asked for"


async def test_thoughts_prose_and_calls_are_items(served: Served) -> None:
    served.generator.script = [*words(THOUGHT, "Let me see. ", calling("Köln"), calling("Ulm"))]
    body = await served.whole(tools=[WEATHER])
    reasoning, message, first, second = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (reasoning["summary"], "encrypted_content" in reasoning) == ([], False)
    assert message["content"][0]["text"] == "Let me see. "
    assert [call["type"] for call in (first, second)] == ["function_call"] * 2
    assert [json.loads(call["arguments"])["city"] for call in (first, second)] == ["Köln", "Ulm"]
    assert first["name"] == "weather"
    assert first["call_id"] != second["call_id"]
    assert len({item["id"] for item in body["output"]}) == 4
    assert {item["status"] for item in body["output"]} == {"completed"}


@pytest.mark.parametrize("text", ["Once upon", THOUGHT + "Once", THOUGHT, "<think>\nHm", "", calling("Ulm")[:-20]])
async def test_an_answer_that_reached_its_limit_is_incomplete(served: Served, text: str) -> None:
    served.generator.script = [*words(text, reason=FinishReason.LENGTH)]
    body = await served.whole(max_output_tokens=3, tools=[WEATHER])
    *events, last = await served.events(max_output_tokens=3, tools=[WEATHER])
    assert last["type"] == "response.incomplete"
    for response in (body, last["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["completed_at"] is None
        statuses = [item["status"] for item in response["output"]]
        assert statuses == ["completed"] * (len(statuses) - 1) + ["incomplete"]
    assert put_together(events) == last["response"]["output"]


async def test_an_empty_answer_is_an_empty_message(served: Served) -> None:
    served.generator.script = [*words()]
    body = await served.whole()
    assert [item["content"][0]["text"] for item in body["output"]] == [""]
    *events, last = await served.events()
    assert [item["content"][0]["text"] for item in put_together(events)] == [""]
    assert last["response"]["status"] == "completed"


# --- streams ------------------------------------------------------------------------------------------


async def test_a_stream_is_exactly_openais(served: Served) -> None:
    events = await served.events(instructions="Be brief.")
    assert types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    created, in_progress, *middle, completed = events
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["usage"]) == ("in_progress", None)
    [message] = put_together(middle)
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert middle[1] == {
        "type": "response.content_part.added",
        "sequence_number": 3,
        "item_id": message["id"],
        "output_index": 0,
        "content_index": 0,
        "part": part,
    }
    assert middle[3] == {
        "type": "response.output_text.delta",
        "sequence_number": 5,
        "item_id": message["id"],
        "output_index": 0,
        "content_index": 0,
        "delta": " upon",
        "logprobs": [],
    }
    assert message["content"] == [part | {"text": "Once upon a time"}]
    body = await served.whole(instructions="Be brief.")
    final = completed["response"]
    for response in (body, final):
        for name in ("id", "created_at", "completed_at"):
            assert response.pop(name)
        assert response["output"][0].pop("id")
    assert final == body
    assert served.generator.closed_early == 0


async def test_items_of_a_stream_come_one_after_the_other(served: Served) -> None:
    served.generator.script = [
        *words("<think>\nHm", ".\n</think>\n\n", "Let me ", "see.", calling("Köln"), calling("Ulm"))
    ]
    *events, last = await served.events(tools=[WEATHER])
    items = put_together(events)
    assert items == last["response"]["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["content"][0]["text"] == "Hm."
    assert [json.loads(item["arguments"]) for item in items[2:]] == [{"city": "Köln"}, {"city": "Ulm"}]
    named = [name for name in types(events) if "delta" not in name]
    assert named[2:7] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert named[-6:] == ["output_item.added", "function_call_arguments.done", "output_item.done"] * 2


async def test_text_is_escaped_and_characters_stay_whole(served: Served) -> None:
    text = 'say "hi"\n\\ 🦊 é \u2028 "delta":""'
    served.generator.script = [*[Delta((token,)) for token in ids(text)], Delta((), FinishReason.LENGTH)]
    events = await served.events()
    deltas = [event["delta"] for event in events if "delta" in event]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


async def test_a_stop_string_completes_the_answer(served: Served) -> None:
    served.generator.script = [Delta(ids("one two ST")), Delta(ids("OP three")), asyncio.Event()]
    *events, last = await served.events(stop="STOP")
    assert put_together(events)[0]["content"][0]["text"] == "one two "
    assert last["type"] == "response.completed"
    assert served.generator.closed_early == 1


async def test_logprobs_come_with_the_text_they_belong_to(served: Served) -> None:
    tokens = ids("Once upon")
    entries = tuple(TokenLogprob(token, -0.5, ((token, -0.5), (5, float("-inf")))) for token in tokens)
    served.generator.script = [
        *[Delta((token,), logprobs=(entry,)) for token, entry in zip(tokens, entries, strict=True)],
        Delta((), FinishReason.LENGTH),
    ]
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = await served.whole(**asked)
    logprobs = body["output"][0]["content"][0]["logprobs"]
    assert "".join([entry["token"] for entry in logprobs]) == "Once upon"
    assert bytes(logprobs[0]["bytes"]).decode() == logprobs[0]["token"]
    assert [top["logprob"] for top in logprobs[0]["top_logprobs"]] == [-0.5, -9999.0]
    assert served.generator.requests[0].sampling.top_logprobs == 2
    *events, last = await served.events(**asked)
    for event in events:
        if event["type"] == "response.output_text.delta":
            assert "".join([entry["token"] for entry in event["logprobs"]]) == event["delta"]
    put_together(events)
    assert last["response"]["output"][0]["content"][0]["logprobs"] == logprobs
    await served.whole()
    assert served.generator.requests[-1].sampling.top_logprobs is None


async def test_thoughts_and_calls_of_a_stream_have_no_logprobs(served: Served) -> None:
    tokens = ids(THOUGHT + "Once" + calling("Ulm"))
    served.generator.script = [
        *[Delta((token,), logprobs=(TokenLogprob(token, -0.5),)) for token in tokens],
        Delta((), FinishReason.LENGTH),
    ]
    *events, last = await served.events(include=["message.output_text.logprobs"], tools=[WEATHER])
    reasoning, message, call = put_together(events)
    assert last["response"]["output"] == [reasoning, message, call]
    assert (reasoning["content"][0]["text"], json.loads(call["arguments"])) == ("Hm.", {"city": "Ulm"})
    [part] = message["content"]
    assert "".join([entry["token"] for entry in part["logprobs"]]) == part["text"] == "Once"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_trace_comes_on_request(served: Served, stream: bool) -> None:
    def trace(trace: Trace) -> None:
        trace.decode_worker = "d1"

    served.generator.script.insert(0, trace)
    asked = {"kvmesh": {"trace": True, "worker": "d1"}, "user": "me"}
    if stream:
        first, *_, last = await served.events(**asked)
        assert "kvmesh" not in first["response"]
        response = last["response"]
    else:
        response = await served.whole(**asked)
    assert response["kvmesh"]["decode_worker"] == "d1"
    assert served.generator.hints == [Hints(pin="d1", session="me")]


# --- what the model and the engine get ----------------------------------------------------------------


async def test_limits_and_sampling_reach_the_engine(served: Served) -> None:
    await served.whole(
        max_output_tokens=5, min_tokens=2, seed=7, temperature=0, top_p=0.5, top_k=3, min_p=0.1, cache_salt="a",
        ignore_eos=True, stop_token_ids=[7], presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5,
    )  # fmt: skip
    [request] = served.generator.requests
    stop, sampling = request.stop, request.sampling
    assert (stop.max_tokens, stop.min_tokens, stop.stop_token_ids, stop.ignore_eos) == (5, 2, (7,), True)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 3, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert (sampling.seed, request.cache_salt) == (7, "a")


async def test_a_conversation_is_rendered_with_thoughts_and_calls(served: Served) -> None:
    conversation = [
        {"role": "user", "content": "Rain?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "weather", "arguments": '{"city":"Ulm"}'},
        {"type": "function_call_output", "call_id": "c", "output": "sun"},
    ]
    await served.whole(input=conversation, instructions="Be brief.", reasoning={"effort": "low"})
    assert served.prompt() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nRain?<|im_end|>\n"
        '<|im_start|>assistant\n<think>Hm.</think><tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}'
        "</tool_call><|im_end|>\n"
        "<|im_start|>tool\nsun<|im_end|>\n"
        "<|im_start|>assistant\nlow"
    )


async def test_structured_output_becomes_a_guide(served: Served) -> None:
    schema = {"type": "object"}
    await served.whole(text={"format": {"type": "json_schema", "name": "a", "schema": schema}})
    await served.whole(text={"format": {"type": "json_object"}})
    await served.whole(text={"format": {"type": "text"}})
    by_schema, by_json, free = [request.guide for request in served.generator.requests]
    assert by_schema is not None and by_json is not None and free is None
    assert (by_schema.kind, json.loads(by_schema.value)) == (GuideKind.JSON_SCHEMA, schema)
    assert by_json.kind is GuideKind.JSON


async def test_an_engine_without_guides_refuses_them(served: Served, thinking_model: Any) -> None:
    served.models.add(replace(tiny.card("p", model="plain", path=thinking_model)))
    status, _, body = await served.post(ASKED | {"model": "plain", "text": {"format": {"type": "json_object"}}})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert "engine" in body["error"]["message"]


async def test_a_forced_call_is_read_from_its_json(served: Served) -> None:
    served.generator.script = [*words('{"city": ', '"Ulm"}')]
    choice = {"type": "function", "name": "weather"}
    body = await served.whole(tools=[WEATHER], tool_choice=choice)
    [call] = body["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Ulm"})
    assert body["tool_choice"] == choice
    *events, last = await served.events(tools=[WEATHER], tool_choice=choice)
    assert json.loads(put_together(events)[0]["arguments"]) == {"city": "Ulm"}
    assert last["type"] == "response.completed"


# --- the official client ------------------------------------------------------------------------------


async def test_the_official_client(served: Served) -> None:
    async with served.client() as client:
        whole = await client.responses.create(model="tiny", input="hi")
        assert (whole.output_text, whole.status, whole.error) == ("Once upon a time", "completed", None)
        stream = await client.responses.create(model="tiny", input="hi", stream=True)
        events = [event async for event in stream]
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == "Once upon a time"
        async with client.responses.stream(model="tiny", input="hi") as accumulated:
            async for _ in accumulated:
                pass
            final = await accumulated.get_final_response()
        assert (final.output_text, final.usage) == (whole.output_text, whole.usage)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(model="gpt", input="hi")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
        assert refused.value.param == "previous_response_id"


def ask_synchronously(client: openai.OpenAI) -> tuple[str, str, str]:
    with client:
        whole = client.responses.create(model="tiny", input="hi").output_text
        events = client.responses.create(model="tiny", input="hi", stream=True)
        streamed = "".join([event.delta for event in events if event.type == "response.output_text.delta"])
        with client.responses.stream(model="tiny", input="hi") as stream:
            return whole, streamed, stream.get_final_response().output_text


async def test_the_official_synchronous_client(served: Served) -> None:
    answers = await asyncio.to_thread(ask_synchronously, served.sync_client())
    assert answers == ("Once upon a time",) * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_round_of_tools_with_the_official_client(served: Served, stream: bool) -> None:
    """The output of one answer is sent back as it came, with the results of the calls."""
    served.generator.script = [*words(THOUGHT, calling("Köln"), calling("Ulm"))]
    conversation: list[Any] = [{"role": "user", "content": "Where does it rain?"}]
    async with served.client() as client:
        if stream:
            async with client.responses.stream(model="tiny", input=conversation, tools=[WEATHER]) as accumulated:
                answer: Any = await accumulated.get_final_response()
        else:
            answer = await client.responses.create(model="tiny", input=conversation, tools=[WEATHER])
        conversation += [item.model_dump(exclude_none=True) for item in answer.to_dict() and answer.output]
        for item in answer.output:
            if item.type == "function_call":
                city = json.loads(item.arguments)["city"]
                output = f"rain in {city}"
                conversation.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
        served.generator.script = [*words("In both.")]
        for entry in conversation:
            entry.pop("parsed_arguments", None)
        last = await client.responses.create(model="tiny", input=conversation, tools=[WEATHER])
    assert last.output_text == "In both."
    prompt = served.prompt()
    assert "<think>Hm.</think>" in prompt
    assert prompt.count("<tool_call>") == 2
    assert prompt.index("rain in Köln") < prompt.index("rain in Ulm")


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


async def test_parsed_output_with_the_official_client(served: Served) -> None:
    served.generator.script = [*words('{"city": "Ulm", ', '"degrees": 7}')]
    async with served.client() as client:
        whole = await client.responses.parse(model="tiny", input="hi", text_format=Weather)
        assert whole.output_parsed == Weather(city="Ulm", degrees=7)
        async with client.responses.stream(model="tiny", input="hi", text_format=Weather) as stream:
            final = await stream.get_final_response()
        assert final.output_parsed == whole.output_parsed
    guide = served.generator.requests[0].guide
    assert guide is not None
    assert json.loads(guide.value)["required"] == ["city", "degrees"]


async def test_the_official_client_raises_for_a_broken_stream(served: Served) -> None:
    served.generator.script = [Delta(ids("Once")), PeerLostError("worker w died")]
    async with served.client() as client:
        stream = await client.responses.create(model="tiny", input="hi", stream=True)
        *_, error, failed = [event async for event in stream]
        assert error.type == "error" and error.message == "worker w died"
        assert failed.type == "response.failed" and failed.response.error is not None
        async with client.responses.stream(model="tiny", input="hi") as accumulated:
            with pytest.raises(RuntimeError):
                await accumulated.get_final_response()


# --- failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OverloadedError("full"), 429, "overloaded"),
        (EngineError("broken"), 502, "engine"),
        (DeadlineExceededError("late"), 504, "deadline_exceeded"),
        (RuntimeError("a bug"), 500, "internal"),
    ],
    ids=lambda value: str(value)[:9],
)
async def test_failures_before_the_first_token_have_a_status(
    served: Served, error: BaseException, status: int, code: str, stream: bool
) -> None:
    served.generator.script = [error]
    got, _, body = await served.post(ASKED | {"stream": stream})
    assert (got, body["error"]["code"]) == (status, code)
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("error", "code", "known_code"),
    [
        (OverloadedError("full"), "overloaded", "rate_limit_exceeded"),
        (EngineError("broken"), "engine", "server_error"),
        (MeshError("odd"), "internal", "server_error"),
        (RuntimeError("a bug"), "internal", "server_error"),
    ],
    ids=lambda value: str(value)[:9],
)
async def test_failures_after_the_headers_are_told_by_the_last_events(
    served: Served, error: BaseException, code: str, known_code: str
) -> None:
    served.generator.script = [Delta(ids("Once")), error]
    *_, told, failed = await served.events()
    assert (told["type"], told["code"], told["param"]) == ("error", code, None)
    assert failed["type"] == "response.failed"
    response = checked(failed["response"])
    assert (response["status"], response["error"]) == ("failed", {"code": known_code, "message": told["message"]})
    assert "a bug" not in told["message"]
    [message] = response["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "Once")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_breaks_off_never_looks_whole(served: Served, stream: bool) -> None:
    served.generator.script = [Delta(ids("Once"))]
    if stream:
        last = (await served.events())[-1]
        assert last["type"] == "response.failed"
    else:
        status, _, body = await served.post(ASKED)
        assert (status, body["error"]["code"]) == (502, "engine")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_request(served: Served, stream: bool) -> None:
    served.generator.script = [Delta(ids("Once")), asyncio.Event()]
    data = json.dumps(ASKED | {"stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    writer.write(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    async with asyncio.timeout(PATIENCE_S):
        if stream:
            await reader.readuntil(b"output_text.delta")
        else:
            await served.generator.started.wait()
        writer.close()
        await served.generator.ended.wait()
        await served.admission.wait_idle()
    assert served.generator.closed_early == 1


async def test_too_long_an_input_is_refused_by_name(served: Served) -> None:
    status, _, body = await served.post(ASKED | {"input": "word " * 9000})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "input")
    assert served.generator.requests == []


@pytest.mark.parametrize("depth", [900, 970, 980, 985, 990, 994, 996, 1000, 5000])
async def test_deeply_nested_schemas_never_break_the_answer(served: Served, depth: int) -> None:
    schema: Any = '{"a":' * depth + "1" + "}" * depth
    tools = f'"tools":[{{"type":"function","name":"f","parameters":{schema}}}],"tool_choice":"none"'
    for stream in ("false", "true"):
        body = f'{{"model":"tiny","input":"hi","stream":{stream},{tools}}}'
        status, _, reply = await served.post(body.encode())
        assert status in (200, 400), reply
