"""A forced call that the limit cuts off, at any token: no prose, and as much of the call as is known."""

import json
import re
from typing import Any

import pytest

from kvmesh.frontend.parsers.events import CallArguments, CallBegun
from kvmesh.frontend.parsers.tools import forced_arguments, forced_calls
from kvmesh.protocol.messages import Delta, FinishReason
from tests.frontend.parsers.streams import run
from tests.frontend.serving import BACKEND, Served, ids

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
REQUIRED = '[{"name": "weather", "parameters": {"city": "Köln \\" [{"}}, {"name": "time", "parameters": {}}]'
NAMED = '{"city": "Köln \\" [{", "days": [1, {"a": null}]}'
Call = tuple[str, str]  # (name, arguments as far as they were written, and closed)


def closed(text: str) -> str:
    """Return the longest beginning of arguments that brackets and a quote complete, completed."""
    for size in range(len(text), 0, -1):
        if text[size - 1].isdigit() or text[size - 1] in "trufalsen":
            in_string = len(re.findall(r'(?<!\\)"', text[:size])) % 2
            if not in_string and text[size : size + 1] not in (",", "]", "}"):
                continue
        for ending in ("", "}", '"}', "]}", "}]}"):
            try:
                json.loads(text[:size] + ending)
            except ValueError:
                continue
            return text[:size] + ending
    return "{}"


def calls_in(text: str, is_named: bool) -> list[Call]:
    """Return what a client can know of the calls in the beginning of an answer."""
    if is_named:
        return [("weather", closed(text))] if text else []
    known = []
    for name, arguments in (("weather", '{"city": "Köln \\" [{"}'), ("time", "{}")):
        head = f'"name": "{name}"'
        if head in text:
            begun = text.partition(head + ', "parameters": ')[2]
            known.append((name, closed(begun[: len(arguments)])))
    return known


CUTS = [
    pytest.param(text, is_named, id=name)
    for name, text, is_named in (("required", REQUIRED, False), ("named", NAMED, True))
]


@pytest.mark.parametrize(("text", "is_named"), CUTS)
def test_a_cut_anywhere_leaves_calls_and_no_prose(text: str, is_named: bool) -> None:
    for size in range(len(text) + 1):
        parser = forced_arguments("weather") if is_named else forced_calls()
        events = run(parser, list(text[:size]))
        assert all(isinstance(event, CallBegun | CallArguments) for event in events), (size, events)
        calls: list[Call] = []
        for event in events:
            name, before = (event.name, "") if isinstance(event, CallBegun) else calls.pop()
            calls.append((name, before + (event.fragment if isinstance(event, CallArguments) else "")))
        assert calls == calls_in(text[:size], is_named)


@pytest.mark.parametrize("blank", [" ", "\n\n ", " [", "[\n{"])
def test_white_space_and_brackets_alone_are_dropped(blank: str) -> None:
    assert run(forced_calls(), [blank]) == []
    assert run(forced_arguments("f"), [blank.strip("[\n{") or " "]) == []


# --- in each dialect ------------------------------------------------------------------------------------


def chat(is_named: bool) -> tuple[str, dict[str, Any]]:
    functions = [{"name": "weather", "parameters": PARAMETERS}, {"name": "time"}]
    choice: Any = {"type": "function", "function": {"name": "weather"}} if is_named else "required"
    tools = [{"type": "function", "function": function} for function in functions]
    asked = [{"role": "user", "content": "hi"}]
    return "/v1/chat/completions", {"model": "tiny", "messages": asked, "tools": tools, "tool_choice": choice}


def messages(is_named: bool) -> tuple[str, dict[str, Any]]:
    tools = [{"name": "weather", "input_schema": PARAMETERS}, {"name": "time", "input_schema": {"type": "object"}}]
    choice = {"type": "tool", "name": "weather"} if is_named else {"type": "any"}
    asked = [{"role": "user", "content": "hi"}]
    return "/v1/messages", {"model": "tiny", "max_tokens": 99, "messages": asked, "tools": tools, "tool_choice": choice}


def responses(is_named: bool) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS}, {"type": "function", "name": "time"}]
    choice: Any = {"type": "function", "name": "weather"} if is_named else "required"
    return "/v1/responses", {"model": "tiny", "input": "hi", "tools": tools, "tool_choice": choice}


def of_chat(answer: dict[str, Any]) -> tuple[str, list[Call], str]:
    [choice] = answer["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    content = choice["message"]["content"] or ""
    return content, [(call["name"], call["arguments"]) for call in calls], choice["finish_reason"]


def of_messages(answer: dict[str, Any]) -> tuple[str, list[Call], str]:
    calls = [(block["name"], written_input(block["input"])) for block in answer["content"] if block["type"] != "text"]
    text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    return text, calls, answer["stop_reason"]


def written_input(value: dict[str, Any]) -> str:
    return str(value["INVALID_JSON"]) if "INVALID_JSON" in value else json.dumps(value, ensure_ascii=False)


def of_responses(answer: dict[str, Any]) -> tuple[str, list[Call], str]:
    calls = [(item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts), calls, answer["incomplete_details"]["reason"]


def of_chat_stream(events: list[dict[str, Any]]) -> tuple[str, list[Call], str]:
    choices = [event["choices"][0] for event in events]
    calls: list[Call] = []
    for function in [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", [])]:
        name, before = (function["name"], "") if "name" in function else calls.pop()
        calls.append((name, before + function["arguments"]))
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    return content, calls, choices[-1]["finish_reason"]


def of_messages_stream(events: list[dict[str, Any]]) -> tuple[str, list[Call], str]:
    calls: list[Call] = []
    text = ""
    for event in events:
        match event:
            case {"content_block": {"type": "tool_use", "name": name}}:
                calls.append((name, ""))
            case {"delta": {"partial_json": fragment}}:
                name, before = calls.pop()
                calls.append((name, before + fragment))
            case {"content_block": {"text": said}} | {"delta": {"text": said}}:
                text += said
    [reason] = [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"]
    return text, calls, reason


def of_responses_stream(events: list[dict[str, Any]]) -> tuple[str, list[Call], str]:
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    whole = of_responses(events[-1]["response"])
    assert text == whole[0]
    return whole


DIALECTS = [
    pytest.param(chat, of_chat, of_chat_stream, "length", id="chat"),
    pytest.param(messages, of_messages, of_messages_stream, "max_tokens", id="messages"),
    pytest.param(responses, of_responses, of_responses_stream, "max_output_tokens", id="responses"),
]


@pytest.mark.parametrize(("ask", "whole", "streamed", "reason"), DIALECTS)
@pytest.mark.parametrize(("text", "is_named"), CUTS)
async def test_every_limit_gives_no_content_whole_or_streamed(
    able: Served, ask: Any, whole: Any, streamed: Any, reason: str, text: str, is_named: bool
) -> None:
    tokens = ids(text)
    path, body = ask(is_named)
    for limit in range(1, len(tokens)):
        able.generator.script = [*[Delta((token,)) for token in tokens[:limit]], Delta((), FinishReason.LENGTH)]
        written = BACKEND.decode(list(tokens[:limit]))
        status, _, answer = await able.post(path, body)
        assert status == 200, answer
        _, _, stream = await able.post(path, body | {"stream": True})
        events = [json.loads(data) for data in re.findall(r"^data: (\{.*)$", stream, re.MULTILINE)]
        known = calls_in(written, is_named)
        in_message = [(name, arguments or "{}") for name, arguments in known] if ask is messages else known
        assert whole(answer) == ("", in_message, reason), limit
        assert streamed(events) == ("", known, reason), limit
