"""The Messages API over real sockets: the exact events, and what Anthropic's own client makes of them."""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic.types import Message, RawMessageStreamEvent, ToolUseBlock
from msgspec.structs import replace

from kvmesh.frontend.generator import Trace
from kvmesh.protocol.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineError,
    MeshError,
    NoWorkerError,
    OverloadedError,
    PeerLostError,
)
from kvmesh.protocol.messages import Delta, FinishReason, unpack_tokens
from tests.frontend import tiny
from tests.frontend.anthropic.serving import (
    ASKED,
    WEATHER,
    Served,
    calling,
    ids,
    put_together,
    read_events,
    words,
)
from tests.support.patience import PATIENCE_S

CALLING = ("<think>\nHm", "m.\n</think>\n\n", "I will", " look.\n", calling("Köln")[:30], calling("Köln")[30:])
WITH_TOOLS: dict[str, Any] = ASKED | {"tools": [WEATHER]}
NO_TIERS: dict[str, Any] = {  # what usage says of caches that are paid for by time, and of priority
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "service_tier": "standard",
}


def cached(trace: Trace) -> None:
    trace.cached_tokens = 4


# --- answers ------------------------------------------------------------------------------------------


async def test_a_whole_answer(served: Served) -> None:
    served.generator.script.insert(0, cached)
    status, _, body = await served.post(ASKED)
    assert status == 200, body
    prompt = unpack_tokens(served.generator.requests[0].prompt)
    assert served.prompt() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert body == {
        "id": served.generator.requests[0].request_id.replace("msg-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Once upon a time"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": len(prompt) - 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": len(ids("Once")) + len(ids(" upon")) + len(ids(" a time")) + 1,
            **NO_TIERS,
        },
    }


async def test_a_stream_is_exactly_anthropics(served: Served) -> None:
    served.generator.script = [cached, *words("<think>\nHm", "m.\n</think>\n\n", "Once", " upon", calling("Ulm"))]
    start, *blocks, delta, stop = await served.events(WITH_TOOLS)
    message = start["message"]
    assert start == {"type": "message_start", "message": message}
    assert re.fullmatch(r"msg_[0-9a-f]{24}", message["id"])
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    call_id = blocks[9]["content_block"]["id"]
    begun = {"type": "tool_use", "id": call_id, "name": "weather", "input": {}, "caller": {"type": "direct"}}
    assert [(block["type"].removeprefix("content_block_"), block["index"], block) for block in blocks] == [
        (kind, index, {"type": f"content_block_{kind}", "index": index} | rest)
        for kind, index, rest in [
            ("start", 0, {"content_block": {"type": "thinking", "thinking": "", "signature": ""}}),
            ("delta", 0, {"delta": {"type": "thinking_delta", "thinking": "Hm"}}),
            ("delta", 0, {"delta": {"type": "thinking_delta", "thinking": "m."}}),
            ("delta", 0, {"delta": {"type": "signature_delta", "signature": ""}}),
            ("stop", 0, {}),
            ("start", 1, {"content_block": {"type": "text", "text": ""}}),
            ("delta", 1, {"delta": {"type": "text_delta", "text": "Once"}}),
            ("delta", 1, {"delta": {"type": "text_delta", "text": " upon"}}),
            ("stop", 1, {}),
            ("start", 2, {"content_block": begun}),
            ("delta", 2, {"delta": {"type": "input_json_delta", "partial_json": '{"city": "Ulm"}'}}),
            ("stop", 2, {}),
        ]
    ]
    usage = {
        "input_tokens": len(unpack_tokens(served.generator.requests[0].prompt)) - 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
    }
    first_tokens = message["usage"]["output_tokens"]
    assert message["usage"] == usage | {"output_tokens": first_tokens} | NO_TIERS
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None}
    assert delta["usage"] == usage | {"output_tokens": delta["usage"]["output_tokens"]}
    assert delta["usage"]["output_tokens"] > first_tokens
    assert stop == {"type": "message_stop"}


async def test_a_whole_answer_has_the_same_blocks(served: Served) -> None:
    served.generator.script = words(*CALLING)
    streamed = put_together(await served.events(WITH_TOOLS))
    _, _, whole = await served.post(WITH_TOOLS)
    for answer in (streamed, whole):
        del answer["id"], answer["content"][2]["id"]
    assert whole == streamed


async def test_text_is_escaped_and_characters_stay_whole(served: Served) -> None:
    text = 'say "hi"\n\\ 🦊 é \u2028'
    served.generator.script = [*[Delta((token,)) for token in ids(text)], Delta((), FinishReason.LENGTH)]
    told = put_together(await served.events(ASKED))
    assert told["content"] == [{"type": "text", "text": text}]
    assert told["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "fields", "reason", "sequence", "text"),
    [
        (words("one two STOP three"), {"stop_sequences": ["nope", "STOP"]}, "stop_sequence", "STOP", "one two "),
        (words("one two"), {"stop_sequences": ["STOP"]}, "end_turn", None, "one two"),
        ([Delta(ids("one")), Delta((), FinishReason.LENGTH)], {}, "max_tokens", None, "one"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_why_an_answer_ended(
    served: Served,
    script: list[Any],
    fields: dict[str, Any],
    reason: str,
    sequence: str | None,
    text: str,
    stream: bool,
) -> None:
    served.generator.script = script
    asked = ASKED | fields
    told = put_together(await served.events(asked)) if stream else (await served.post(asked))[2]
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, sequence)
    assert told["content"][0]["text"] == text


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_nothing_has_no_blocks(served: Served, stream: bool) -> None:
    served.generator.script = words()
    told = put_together(await served.events(ASKED)) if stream else (await served.post(ASKED))[2]
    assert (told["content"], told["stop_reason"]) == ([], "end_turn")


@pytest.mark.parametrize("stream", [False, True])
async def test_omitted_thoughts_leave_an_empty_block(served: Served, stream: bool) -> None:
    served.generator.script = words("<think>\nHm.\n</think>\n\n", "Yes")
    asked = ASKED | {"thinking": {"type": "adaptive", "display": "omitted"}}
    told = put_together(await served.events(asked)) if stream else (await served.post(asked))[2]
    assert told["content"] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": "Yes"},
    ]


async def test_arguments_that_broke_off_are_not_lost(served: Served) -> None:
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köl'
    served.generator.script = [Delta(ids(written)), Delta((), FinishReason.LENGTH)]
    _, _, whole = await served.post(WITH_TOOLS)
    [call] = whole["content"]
    assert (call["type"], call["name"], whole["stop_reason"]) == ("tool_use", "weather", "max_tokens")
    assert call["input"] == {"city": "Köl"}


async def test_arguments_are_passed_on_as_they_were_written(served: Served) -> None:
    written = '{"city": 123456789012345678901234567890, "x": 1.50}'
    served.generator.script = words(f'<tool_call>\n{{"name": "weather", "arguments": {written}}}\n</tool_call>')
    _, _, text = await served.post(WITH_TOOLS)
    assert text["content"][0]["input"] == json.loads(written)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_trace_comes_on_request(served: Served, stream: bool) -> None:
    def trace(trace: Trace) -> None:
        trace.decode_worker = "d1"

    served.generator.script.insert(0, trace)
    asked = ASKED | {"kvmesh": {"trace": True}}
    told = (await served.events(asked))[-1] if stream else (await served.post(asked))[2]
    assert told["kvmesh"]["decode_worker"] == "d1"


# --- what the model reads -----------------------------------------------------------------------------


async def test_an_answer_goes_on_with_the_last_message(served: Served) -> None:
    await served.post(ASKED | {"messages": [*ASKED["messages"], {"role": "assistant", "content": "Once"}]})
    assert served.prompt() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nOnce"


async def test_without_thinking_the_template_closes_the_thoughts(served: Served) -> None:
    await served.post(ASKED | {"thinking": {"type": "disabled"}})
    assert served.prompt().endswith("assistant\n<think>\n\n</think>\n\n")


async def test_limits_reach_the_engine(served: Served) -> None:
    await served.post(ASKED | {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "metadata": {"user_id": "me"}})
    [request] = served.generator.requests
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.25, 3)
    assert (request.stop.max_tokens, served.generator.hints[0].session) == (2000, "me")


# --- counting -----------------------------------------------------------------------------------------


async def test_tokens_are_counted_without_a_worker(served: Served) -> None:
    asked = {name: value for name, value in WITH_TOOLS.items() if name != "max_tokens"} | {"system": "be kind"}
    status, _, counted = await served.post(asked, "/v1/messages/count_tokens")
    assert (status, served.generator.requests) == (200, [])
    _, _, answer = await served.post(asked | {"max_tokens": 1})
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}


async def test_a_prompt_sure_not_to_fit_is_not_counted(served: Served) -> None:
    served.models.add(
        tiny.card("s", model="small", path=served.models.find("tiny").facts.model_path, context_tokens=16)
    )
    asked = {"model": "small", "messages": [{"role": "user", "content": "word " * 1000}]}
    status, _, body = await served.post(asked, "/v1/messages/count_tokens")
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 15 maximum", body["error"]["message"])


async def test_counting_is_refused_as_asking_is(served: Served) -> None:
    served.admission.drain()
    asked = {"model": "tiny", "messages": ASKED["messages"]}
    status, headers, body = await served.post(asked, "/v1/messages/count_tokens")
    assert (status, headers["Retry-After"], body["error"]["type"]) == (503, "2", "overloaded_error")


# --- failures -----------------------------------------------------------------------------------------

FAILURES: list[tuple[BaseException, int, str, type[anthropic.APIStatusError]]] = [
    (OverloadedError("full"), 429, "rate_limit_error", anthropic.RateLimitError),
    (NoWorkerError("none"), 503, "overloaded_error", anthropic.InternalServerError),
    (DrainingError("bye"), 503, "overloaded_error", anthropic.InternalServerError),
    (DeadlineExceededError("late"), 504, "timeout_error", anthropic.InternalServerError),
    (PeerLostError("gone"), 502, "api_error", anthropic.InternalServerError),
    (EngineError("broken"), 502, "api_error", anthropic.InternalServerError),
    (MeshError("odd"), 500, "api_error", anthropic.InternalServerError),
    (RuntimeError("a bug"), 500, "api_error", anthropic.InternalServerError),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "kind", "raised"), FAILURES, ids=lambda value: str(value)[:9])
async def test_failures_before_the_first_token_have_a_status(
    served: Served, error: BaseException, status: int, kind: str, raised: type[anthropic.APIStatusError], stream: bool
) -> None:
    served.generator.script = [error]
    got, _, body = await served.post(ASKED | {"stream": stream})
    assert (got, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert set(body["error"]) == {"type", "message"}
    assert "a bug" not in body["error"]["message"]
    async with served.client() as client:
        with pytest.raises(raised) as failed:
            await client.messages.create(**ASKED, stream=stream)
    assert (failed.value.status_code, failed.value.type) == (status, kind)


@pytest.mark.parametrize(("error", "status", "kind", "raised"), FAILURES, ids=lambda value: str(value)[:9])
async def test_failures_after_the_headers_are_the_last_event(
    served: Served, error: BaseException, status: int, kind: str, raised: type[anthropic.APIStatusError]
) -> None:
    served.generator.script = [Delta(ids("Once")), error]
    *_, text, last = await served.events(ASKED)
    assert text["delta"] == {"type": "text_delta", "text": "Once"}
    assert last["error"]["type"] == kind
    assert last["request_id"] == served.generator.requests[-1].request_id


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_an_error_tells_the_request_id_of_its_headers(served: Served, path: str) -> None:
    refused = ASKED | {"model": "gpt"} if path == "/v1/messages" else {"model": "gpt", "messages": ASKED["messages"]}
    status, headers, body = await served.post(refused, path)
    assert (status, body["request_id"]) == (404, headers["request-id"])
    _, headers, body = await served.post(refused, path, x_request_id="mine")
    assert body["request_id"] == headers["request-id"] == headers["x-request-id"] == "mine"


async def test_an_error_after_the_headers_tells_it_too(served: Served) -> None:
    served.generator.script = [Delta(ids("Once")), EngineError("broken")]
    *_, last = await served.events(ASKED, x_request_id="mine")
    assert last["request_id"] == "mine"


@pytest.mark.parametrize("stream", [False, True])
async def test_disabled_parallel_use_ends_the_answer_before_a_second_call(served: Served, stream: bool) -> None:
    served.generator.script = words(calling("Oslo"), calling("Rome"), " and so on")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    body = ASKED | {"tools": [WEATHER], "tool_choice": choice}
    answer = put_together(await served.events(body)) if stream else (await served.post(body))[2]
    assert [(block["type"], block["input"]) for block in answer["content"]] == [("tool_use", {"city": "Oslo"})]
    assert answer["stop_reason"] == "tool_use"
    assert served.generator.closed_early == 1, "what is still generated is cancelled"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_breaks_off_never_looks_whole(served: Served, stream: bool) -> None:
    served.generator.script = [Delta(ids("Once"))]
    _, _, body = await served.post(ASKED | {"stream": stream})
    last = read_events(body)[-1] if stream else body
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "gpt"}, 404, "not_found_error"),
        ({"bogus": 1}, 400, "invalid_request_error"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_bad_requests_get_anthropics_error_body(
    served: Served, path: str, fields: dict[str, Any], status: int, kind: str
) -> None:
    asked = ASKED if path == "/v1/messages" else {"model": "tiny", "messages": ASKED["messages"]}
    got, _, body = await served.post(asked | fields, path)
    assert (got, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert served.generator.requests == []


async def test_a_prompt_that_fills_the_context_is_refused(served: Served) -> None:
    status, _, body = await served.post(ASKED | {"messages": [{"role": "user", "content": "word " * 9000}]})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 8191 maximum", body["error"]["message"])


async def test_a_schema_needs_an_engine_that_keeps_to_it(served: Served) -> None:
    card = replace(
        tiny.card("u", model="unguided", path=served.models.find("tiny").facts.model_path), context_tokens=8192
    )
    served.models.add(replace(card, tool_parser="hermes"))
    asked = WITH_TOOLS | {"model": "unguided", "tool_choice": {"type": "any"}}
    status, _, body = await served.post(asked)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert "tool_choice" in body["error"]["message"]


# --- the official client ------------------------------------------------------------------------------


async def test_the_clients_whole_answer_and_stream(served: Served) -> None:
    async with served.client() as client:
        whole = await client.messages.create(**ASKED)
        [block] = whole.content
        assert block.type == "text"
        assert (block.text, whole.stop_reason) == ("Once upon a time", "end_turn")
        raw = [event async for event in await client.messages.create(**ASKED, stream=True)]
        assert [event.type for event in raw] == [
            "message_start", "content_block_start", *["content_block_delta"] * 3, "content_block_stop",
            "message_delta", "message_stop",
        ]  # fmt: skip
        async with client.messages.stream(**ASKED) as stream:
            assert "".join([text async for text in stream.text_stream]) == "Once upon a time"
            final = await stream.get_final_message()
        assert (final.usage.output_tokens, final.usage.input_tokens) == (
            whole.usage.output_tokens,
            whole.usage.input_tokens,
        )
        counted = await client.messages.count_tokens(model="tiny", messages=ASKED["messages"])
        assert counted.input_tokens == whole.usage.input_tokens


async def test_every_event_is_valid_by_the_clients_own_types(served: Served) -> None:
    served.generator.script = words(*CALLING)
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(RawMessageStreamEvent)
    for event in await served.events(WITH_TOOLS):
        adapter.validate_python(event, strict=True)
    _, _, whole = await served.post(WITH_TOOLS)
    Message.model_validate(whole, strict=True)


def look_up(client: anthropic.Anthropic, create: Callable[..., Message]) -> Message:
    """Ask, run the tool that the model calls, and give the result back."""
    messages: list[Any] = [{"role": "user", "content": "how is it in Köln?"}]
    first = create(client, messages)
    messages.append({"role": "assistant", "content": first.content})
    [call] = [block for block in first.content if isinstance(block, ToolUseBlock)]
    assert (call.name, call.input, first.stop_reason) == ("weather", {"city": "Köln"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    messages.append({"role": "user", "content": [result]})
    return create(client, messages)


def whole(client: anthropic.Anthropic, messages: list[Any]) -> Message:
    return client.messages.create(model="tiny", max_tokens=2000, messages=messages, tools=[WEATHER])


def streamed(client: anthropic.Anthropic, messages: list[Any]) -> Message:
    with client.messages.stream(model="tiny", max_tokens=2000, messages=messages, tools=[WEATHER]) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("create", [whole, streamed])
async def test_a_tool_is_called_and_its_result_read(served: Served, create: Callable[..., Message]) -> None:
    served.generator.script = words(*CALLING)
    with served.sync_client() as client:
        await asyncio.to_thread(look_up, client, create)
    prompt = served.prompt()
    assert "<think>Hmm.</think>I will look.\n<tool_call>" in prompt, "thoughts and words come back"
    assert '{"name": "weather", "arguments": {"city": "Köln"}}' in prompt
    assert "<|im_start|>tool\nrain<|im_end|>" in prompt


async def test_a_forced_call(served: Served) -> None:
    served.generator.script = words('{"city": ', '"Ulm"}')
    asked = WITH_TOOLS | {"tool_choice": {"type": "tool", "name": "weather"}}
    async with served.client() as client, client.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    [call] = final.content
    assert isinstance(call, ToolUseBlock)
    assert (call.name, call.input, final.stop_reason) == ("weather", {"city": "Ulm"}, "tool_use")
    assert served.generator.requests[0].guide is not None


async def test_several_calls_are_blocks_of_their_own(served: Served) -> None:
    served.generator.script = words(calling("Ulm") + "\n" + calling("Bonn"))
    async with served.client() as client, client.messages.stream(**WITH_TOOLS) as stream:
        final = await stream.get_final_message()
    calls = [block for block in final.content if isinstance(block, ToolUseBlock)]
    assert [call.input for call in calls] == [{"city": "Ulm"}, {"city": "Bonn"}]
    assert len({call.id for call in calls}) == 2


async def test_the_clients_thoughts(served: Served) -> None:
    served.generator.script = words("<think>\nHm", "m.\n</think>\n\n", "Yes")
    async with served.client() as client:
        asked = ASKED | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        async with client.messages.stream(**asked) as stream:
            thoughts = [event.thinking async for event in stream if event.type == "thinking"]
            final = await stream.get_final_message()
    assert "".join(thoughts) == "Hmm."
    thinking, text = final.content
    assert thinking.type == "thinking"
    assert (thinking.thinking, thinking.signature, text.type) == ("Hmm.", "", "text")


async def test_the_clients_stop_sequences(served: Served) -> None:
    served.generator.script = words("one two ST", "OP three")
    async with served.client() as client, client.messages.stream(**ASKED, stop_sequences=["STOP"]) as stream:
        final = await stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "STOP")
    assert final.content[0].type == "text"
    assert final.content[0].text == "one two "
    assert served.generator.closed_early == 1, "the rest is cancelled"


class Weather(pydantic.BaseModel):
    city: str
    rain: bool


async def test_the_clients_structured_output(served: Served) -> None:
    served.generator.script = words('{"city": "Ulm", ', '"rain": true}')
    async with served.client() as client:
        answer = await client.messages.parse(**ASKED, output_format=Weather)
    assert answer.parsed_output == Weather(city="Ulm", rain=True)
    guide = served.generator.requests[0].guide
    assert guide is not None
    assert json.loads(guide.value)["required"] == ["city", "rain"]


async def test_the_clients_errors(served: Served) -> None:
    async with served.client() as client:
        with pytest.raises(anthropic.NotFoundError, match="gpt"):
            await client.messages.create(**ASKED | {"model": "gpt"})
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(**ASKED, extra_body={"temperature": 2})
        with pytest.raises(anthropic.APIStatusError) as too_large:
            await client.messages.create(**ASKED, system="x" * 70_000)
        assert (too_large.value.status_code, too_large.value.type) == (413, "request_too_large")
        served.generator.script = [Delta(ids("Once")), PeerLostError("worker w died")]
        with pytest.raises(anthropic.APIStatusError, match="worker w died") as broken:
            async with client.messages.stream(**ASKED) as stream:
                await stream.get_final_message()
        assert broken.value.type == "api_error"


async def test_the_beta_client(served: Served) -> None:
    async with served.client() as client:
        answer = await client.beta.messages.create(**ASKED, betas=["interleaved-thinking-2025-05-14"])
        assert answer.content[0].type == "text"
        counted = await client.beta.messages.count_tokens(model="tiny", messages=ASKED["messages"])
        assert counted.input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_request(served: Served, stream: bool) -> None:
    served.generator.script = [Delta(ids("Once")), asyncio.Event()]
    async with asyncio.timeout(PATIENCE_S), served.client() as client:
        if stream:
            async with client.messages.stream(**ASKED) as answer:
                async for text in answer.text_stream:
                    assert text == "Once"
                    break
        else:
            waiting = asyncio.create_task(client.messages.create(**ASKED))
            await served.generator.started.wait()
            waiting.cancel()
        await served.generator.ended.wait()
        await served.admission.wait_idle()
    assert served.generator.closed_early == 1
