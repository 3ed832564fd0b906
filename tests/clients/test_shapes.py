"""Requests as other projects send them: each is sent to a frontend as it is, and the answer is what the project reads.

A file below shapes/ says which project sends the request, where that was found, and what has to come back. The contents
are made up; the fields, their kinds and the headers are the project's.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.scripted import CONTEXT_TOKENS, obedient_frontend
from tests.support.patience import PATIENCE_S

SHAPES = Path(__file__).parent / "shapes"
FILES = sorted(SHAPES.glob("*/*.json"))
NAMES = [str(file.relative_to(SHAPES).with_suffix("")) for file in FILES]
PROJECTS = {"claude_code", "cline", "codex", "continue", "open_webui", "opencode"}

Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with obedient_frontend() as (url, _), httpx.Client(base_url=url, timeout=PATIENCE_S, headers={}) as client:
        yield client


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_a_request_of_another_project_is_answered(file: Path, http: httpx.Client) -> None:
    shape = json.loads(file.read_bytes())
    request, expected = shape["request"], shape["expect"]
    body = request.get("body")
    reply = http.request(request["method"], request["path"], headers=request["headers"], json=body)
    assert reply.status_code == expected.get("status", 200), reply.text
    if "message" in expected:
        assert expected["message"] in reply.json()["error"]["message"]
    elif "models" in expected:
        [model] = reply.json()["data"]
        assert model | expected["models"] == model
    else:
        path = request["path"].partition("?")[0]
        text, calls = streamed(path, reply, body) if body.get("stream") else whole(reply)
        assert (text, calls) == (expected.get("text", ""), [expected["call"]] if "call" in expected else [])


def whole(reply: httpx.Response) -> tuple[str, list[str]]:
    """Return the text and the names of the calls of a whole chat completion."""
    [choice] = reply.json()["choices"]
    return choice["message"]["content"], [call["function"]["name"] for call in choice["message"].get("tool_calls", ())]


def streamed(path: str, reply: httpx.Response, body: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the text and the names of the calls of a stream, once it is checked that the stream ends as it has to."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("\n\n")
    lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    match path:
        case "/v1/chat/completions":
            return of_chat(events, body)
        case "/v1/completions":
            return "".join([event["choices"][0]["text"] for event in events]), []
        case "/v1/messages":
            return of_messages(events)
        case _:
            return of_responses(events)


def of_chat(events: Events, body: dict[str, Any]) -> tuple[str, list[str]]:
    if "stream_options" in body:
        usage = events.pop()
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] > usage["usage"]["completion_tokens"] > 0
    choices = [event["choices"][0] for event in events]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    names = [call["function"]["name"] for call in calls if "name" in call["function"]]
    json.loads("".join([call["function"].get("arguments", "") for call in calls]) or "{}")
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [
        "tool_calls" if names else "stop"
    ]
    assert choices[0]["delta"]["role"] == "assistant"
    return "".join([choice["delta"].get("content") or "" for choice in choices]), names


def of_messages(events: Events) -> tuple[str, list[str]]:
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    [block] = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    calls = [block["name"]] if block["type"] == "tool_use" else []
    json.loads("".join([delta.get("partial_json", "") for delta in deltas]) or "{}")
    assert events[-2]["delta"]["stop_reason"] == ("tool_use" if calls else "end_turn")
    return "".join([delta.get("text", "") for delta in deltas]), calls


def of_responses(events: Events) -> tuple[str, list[str]]:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    text = "".join([event["delta"] for event in events if event["type"] == "response.output_text.delta"])
    output = events[-1]["response"]["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    return text, [item["name"] for item in output if item["type"] == "function_call"]


def test_each_project_has_shapes_that_say_where_they_are_from() -> None:
    assert {file.parent.name for file in FILES} == PROJECTS
    for file in FILES:
        shape = json.loads(file.read_bytes())
        assert shape["client"] and shape["what"], file
        assert "github.com/" in shape["source"] or "recorded from npm's" in shape["source"], file


def test_the_model_of_the_shapes_reads_long_prompts(http: httpx.Client) -> None:
    words = "word " * 50_000
    body = {"model": "tiny", "messages": [{"role": "user", "content": f'{words} Please say "enough" now.'}]}
    reply = http.post("/v1/chat/completions", json=body).json()
    assert reply["choices"][0]["message"]["content"] == "enough"
    assert 50_000 < reply["usage"]["prompt_tokens"] < CONTEXT_TOKENS
