"""The requests of Claude Code, as its version 2.1.330 sends them, are answered: the loop of tools, and its counting."""

import json
from typing import Any

from tests.frontend.anthropic.serving import Served, put_together, words

CACHED = {"cache_control": {"type": "ephemeral"}}
HEADERS = {
    "anthropic_version": "2023-06-01",
    "anthropic_beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "mid-conversation-tool-changes-2026-07-01,advanced-tool-use-2025-11-20,effort-2025-11-24",
    "anthropic_dangerous_direct_browser_access": "true",
    "x_app": "cli",
    "x_api_key": "sk-none",
    "x_stainless_helper_method": "stream",
}


def tool(name: str, **fields: str) -> dict[str, Any]:
    """Return a tool in the form that zod gives to its schema."""
    properties = {field: {"description": text, "type": "string"} for field, text in fields.items()}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": list(fields),
        "additionalProperties": False,
    }
    return {"name": name, "description": f"{name}. " * 40, "input_schema": schema}


TOOLS = [
    tool("Bash", command="The command to execute"),
    tool("Read", file_path="The absolute path to the file"),
    tool("ToolSearch", query="Names, or keywords"),
    tool("DeferredToolPlaceholder") | {"defer_loading": True},
]
PROMPT: dict[str, Any] = {
    "model": "tiny",
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are a Claude agent.", **CACHED},
        {"type": "text", "text": "\nYou are an agent working with the user toward their goals.", **CACHED},
    ],
    "tools": TOOLS,
    "thinking": {"type": "adaptive", "display": "updates"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
}
ANSWER: dict[str, Any] = {
    "max_tokens": 128_000,
    "metadata": {"user_id": json.dumps({"device_id": "f" * 64, "account_uuid": "", "session_id": "6515fcce"})},
}
FIRST = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "<system-reminder>\nBe kind.\n</system-reminder>\n"}]
        + [{"type": "text", "text": "read a.txt"}],
    },
    {"role": "system", "content": [{"type": "text", "text": "# Environment\nThe platform is linux.", **CACHED}]},
]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def results(answer: dict[str, Any], *contents: Any) -> dict[str, Any]:
    """Return the user's turn with a result for each call of the answer."""
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    blocks = [
        {"tool_use_id": block["id"], "type": "tool_result", "content": content}
        for block, content in zip(calls, contents, strict=True)
    ]
    blocks[-1] |= CACHED
    return {"role": "user", "content": blocks}


async def ask(served: Served, messages: list[Any]) -> dict[str, Any]:
    asked = PROMPT | ANSWER | {"messages": messages, "stream": True}
    return put_together(await served.events(asked, **HEADERS))


async def test_the_loop_of_tools_runs_to_its_end(served: Served) -> None:
    served.generator.scripts = [
        words(call("ToolSearch", query="select:WebFetch")),
        words("<think>\nHm.\n</think>\n\n", "I look.", call("Read", file_path="/a.txt"), call("Bash", command="ls")),
        words("It says hello."),
    ]
    messages: list[Any] = list(FIRST)
    first = await ask(served, messages)
    assert "DeferredToolPlaceholder" not in served.prompt()
    found = results(first, [{"type": "tool_reference", "tool_name": "DeferredToolPlaceholder"}])
    messages += [{"role": "assistant", "content": first["content"]}, found]
    second = await ask(served, messages)
    assert "DeferredToolPlaceholder. " in served.prompt()
    assert [block["type"] for block in second["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert second["stop_reason"] == "tool_use"
    messages += [{"role": "assistant", "content": second["content"]}, results(second, "1\thello", "a.txt")]
    last = await ask(served, messages)
    assert (last["content"], last["stop_reason"]) == ([{"type": "text", "text": "It says hello."}], "end_turn")
    assert "<|im_start|>tool\n1\thello<|im_end|>" in served.prompt()


async def test_its_prompt_can_be_counted(served: Served) -> None:
    asked = PROMPT | {"messages": FIRST}
    status, _, counted = await served.post(asked, "/v1/messages/count_tokens?beta=true", **HEADERS)
    assert status == 200, counted
    whole = await ask(served, FIRST)
    assert counted == {"input_tokens": whole["usage"]["input_tokens"]}


async def test_its_search_of_the_web_is_refused_by_name(served: Served) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    asked = PROMPT | ANSWER | {"messages": FIRST, "tools": [search], "stream": True}
    status, _, body = await served.post(asked, "/v1/messages?beta=true", **HEADERS)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert "web_search_20250305" in body["error"]["message"]
