"""Tools in namespaces, and what else Codex sends."""

import json
from typing import Any

import pytest
from openai.types.responses import NamespaceToolParam

from kvmesh.frontend.responses.parse import parse_responses
from kvmesh.protocol.errors import InvalidRequestError
from tests.frontend.responses.serving import ASKED, WEATHER, Served, put_together, words

SPAWN = {"type": "function", "name": "spawn", "description": "Start an agent.", "parameters": {"type": "object"}}
WAIT = {"type": "function", "name": "wait"}
AGENTS: NamespaceToolParam = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [SPAWN, WAIT]}  # type: ignore[list-item]
TOOLS = [WEATHER, AGENTS]
WRITTEN = '<tool_call>\n{"name": "agents__spawn", "arguments": {"n": 1}}\n</tool_call>'


def parsed(**fields: Any) -> Any:
    return parse_responses(json.dumps(ASKED | fields).encode())


def test_the_model_knows_each_function_by_one_name() -> None:
    shown = [tool["function"] for tool in parsed(tools=TOOLS).tools.shown]
    assert [tool["name"] for tool in shown] == ["weather", "agents__spawn", "agents__wait"]
    assert [tool.get("description") for tool in shown[1:]] == ["Helpers.\nStart an agent.", None]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_has_the_clients_names(served: Served, stream: bool) -> None:
    served.generator.script = words(WRITTEN)
    if stream:
        events = await served.events(tools=TOOLS)
        [call] = put_together(events)
        body = events[-1]["response"]
    else:
        body = await served.whole(tools=TOOLS)
    [call] = body["output"]
    assert (call["namespace"], call["name"], json.loads(call["arguments"])) == ("agents", "spawn", {"n": 1})
    [_, shown] = body["tools"]
    assert (shown["type"], shown["name"], shown["description"]) == ("namespace", "agents", "Helpers.")
    assert [tool["name"] for tool in shown["tools"]] == ["spawn", "wait"]


async def test_the_call_of_a_plain_function_has_no_namespace(served: Served) -> None:
    served.generator.script = words(WRITTEN.replace("agents__spawn", "weather"))
    [call] = (await served.whole(tools=TOOLS))["output"]
    assert (call["name"], "namespace" in call) == ("weather", False)


async def test_a_call_in_the_history_has_the_name_that_the_model_wrote(served: Served) -> None:
    served.generator.script = words(WRITTEN)
    [call] = (await served.whole(tools=TOOLS))["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    served.generator.script = words("Well.")
    await served.whole(tools=TOOLS, input=[{"role": "user", "content": "hi"}, call, result])
    assert '<tool_call>{"name": "agents__spawn", "arguments": {"n": 1}}</tool_call>' in served.prompt()


BAD: list[tuple[list[Any], str]] = [
    ([AGENTS | {"name": "two words"}], "tools[0].name"),
    ([AGENTS | {"tools": []}], "tools[0].tools"),
    ([AGENTS | {"more": 1}], "tools[0].more"),
    ([WEATHER, AGENTS | {"tools": [WAIT, {"type": "custom", "name": "x"}]}], "tools[1].tools[1].type"),
    ([AGENTS | {"tools": [WAIT | {"async": True}]}], "tools[0].tools[0].async"),
    ([AGENTS, WAIT | {"name": "agents__wait"}], "tools"),
    ([AGENTS, AGENTS], "tools"),
    ([{"type": "web_search", "external_web_access": True}], "tools[0].type"),
]


@pytest.mark.parametrize(("tools", "param"), BAD, ids=lambda value: json.dumps(value)[-60:])
def test_bad_namespaces_are_refused_by_name(tools: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as failure:
        parsed(tools=tools)
    assert failure.value.param == param


def test_a_search_that_may_not_reach_the_web_is_not_offered() -> None:
    offline = {"type": "web_search", "external_web_access": False}
    both = parsed(tools=[WEATHER, offline])
    assert both.tools == parsed(tools=[WEATHER]).tools
    assert [tool.name for tool in both.settings.tools] == ["weather"]
    assert parsed(tools=[offline]).tools is None


def test_what_codex_reports_about_itself_changes_nothing() -> None:
    assert parsed(client_metadata={"session_id": "s"}) == parsed()
