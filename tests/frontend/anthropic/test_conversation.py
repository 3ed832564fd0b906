"""Turns of content blocks become the messages that chat templates know."""

import json
from typing import Any

import msgspec
import pytest

from kvmesh.frontend.anthropic.conversation import chat_messages, clear_thoughts, continues
from kvmesh.frontend.anthropic.shapes import Message, OnlyText
from kvmesh.protocol.errors import InvalidRequestError

CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "rain"}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def said(*turns: tuple[str, Any], system: Any = None) -> list[dict[str, Any]]:
    """The messages, without what is not there."""
    messages = [{"role": role, "content": content} for role, content in turns]
    read = msgspec.json.decode(json.dumps(messages).encode(), type=list[Message])
    prompt = msgspec.json.decode(json.dumps(system).encode(), type=str | list[OnlyText] | None)
    return [{key: value for key, value in m.items() if value is not None} for m in chat_messages(prompt, read)]


def refused(*turns: tuple[str, Any]) -> str | None:
    with pytest.raises(InvalidRequestError) as refused:
        continues(chat_messages(None, msgspec.convert([{"role": r, "content": c} for r, c in turns], list[Message])))
    assert refused.value.param is not None
    return refused.value.param


def test_text_is_text_as_a_string_or_in_blocks() -> None:
    user = {"role": "user", "content": "hi"}
    assert said(("user", "hi")) == said(("user", [text("hi")])) == [user]
    assert said(("user", [text("a"), text("b")])) == [{"role": "user", "content": "a\nb"}]


def test_the_system_prompt_comes_first_unless_empty() -> None:
    system = {"role": "system", "content": "be kind\nbe brief"}
    blocks = [text("be kind") | {"cache_control": {"type": "ephemeral"}}, text("be brief")]
    assert said(("user", "hi"), system=blocks) == [system, {"role": "user", "content": "hi"}]
    assert said(("user", "hi"), system="") == said(("user", "hi"), system=[]) == said(("user", "hi"))


def test_a_system_message_may_stand_among_the_others() -> None:
    assert [m["role"] for m in said(("user", "a"), ("system", "b"), ("user", "c"))] == ["user", "system", "user"]


def test_turns_of_one_role_are_one_turn() -> None:
    joined = said(("user", "a"), ("user", [text("b")]), ("assistant", "c"), ("assistant", "d"))
    assert [(m["role"], m["content"]) for m in joined] == [("user", "a\nb"), ("assistant", "cd")]


def test_calls_and_their_results_are_messages_of_their_own() -> None:
    _, assistant, tool, user = said(
        ("user", "how is it?"), ("assistant", [text("I look."), CALL]), ("user", [RESULT, text("and?")])
    )
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    assert assistant["content"] == "I look."
    assert assistant["tool_calls"] == [{"id": "t1", "type": "function", "function": function}]
    assert tool == {"role": "tool", "content": "rain", "tool_call_id": "t1", "name": "weather"}
    assert user == {"role": "user", "content": "and?"}


def test_a_call_without_words_has_no_content() -> None:
    _, assistant = said(("user", "how is it?"), ("assistant", [CALL]))
    assert "content" not in assistant


@pytest.mark.parametrize(
    ("content", "told"),
    [("rain", "rain"), ([text("rain"), text("wind")], "rain\nwind"), (None, ""), ([], "")],
    ids=str,
)
def test_a_result_is_text_and_a_failure_says_so(content: Any, told: str) -> None:
    result = RESULT | {"content": content}
    assert said(("user", [result]))[0]["content"] == told
    assert said(("user", [result | {"is_error": True}]))[0]["content"] == f"Error: {told}"


def test_the_result_of_an_unknown_call_has_no_name() -> None:
    assert said(("user", [RESULT])) == [{"role": "tool", "content": "rain", "tool_call_id": "t1"}]


def test_thoughts_are_given_back_and_redacted_ones_dropped() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm. ", "signature": "xyz"},
        {"type": "redacted_thinking", "data": "???"},
        {"type": "thinking", "thinking": "Yes.", "signature": ""},
        text("Yes"),
    ]
    assert said(("assistant", blocks)) == [{"role": "assistant", "content": "Yes", "reasoning_content": "Hm. Yes."}]


def test_an_answer_can_be_gone_on_with() -> None:
    def last(*turns: tuple[str, Any]) -> bool:
        messages = msgspec.convert([{"role": role, "content": content} for role, content in turns], list[Message])
        return continues(chat_messages(None, messages))

    assert last(("user", "hi"), ("assistant", "Once"))
    assert not last(("user", "hi"))
    assert not last(("assistant", [CALL]), ("user", [RESULT]))


@pytest.mark.parametrize("content", ["", " ", "Once ", [CALL], [{"type": "thinking", "thinking": "Hm"}]], ids=str)
def test_what_cannot_be_gone_on_with_is_refused(content: Any) -> None:
    assert refused(("user", "hi"), ("assistant", content)) == "messages"


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("user", CALL),
        ("user", {"type": "thinking", "thinking": "Hm"}),
        ("user", {"type": "redacted_thinking", "data": "?"}),
        ("assistant", RESULT),
        ("system", RESULT),
    ],
    ids=str,
)
def test_a_block_in_the_wrong_role_is_refused_by_name(role: str, block: Any) -> None:
    assert refused(("user", "hi"), (role, [text("a"), block])) == "messages[1].content[1].type"


def test_a_user_message_without_blocks_is_refused() -> None:
    assert refused(("user", []), ("assistant", "hi")) == "messages[0].content"


@pytest.mark.parametrize("content", [[], ""], ids=["no blocks", "no text"])
def test_an_empty_answer_is_accepted_as_history(content: Any) -> None:
    empty = {"role": "assistant", "content": ""}
    hi = {"role": "user", "content": "hi"}
    assert said(("user", "hi"), ("assistant", content), ("user", "hi")) == [hi, empty, hi]
    assert refused(("user", "hi"), ("assistant", content)) == "messages", "but no answer continues it"


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ({"INVALID_JSON": '{"city": "Kö'}, {"INVALID_JSON": '{"city": "Kö'}),
        ('{"city": "Kö', {"INVALID_JSON": '{"city": "Kö'}),
        ('{"city": "Köln"}', {"city": "Köln"}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("", {}),
        (None, {}),
        ({}, {}),
    ],
    ids=str,
)
def test_a_call_that_was_cut_off_is_accepted_as_history(sent: Any, told: Any) -> None:
    _, assistant, _ = said(("user", "how is it?"), ("assistant", [CALL | {"input": sent}]), ("user", "and?"))
    assert assistant["tool_calls"][0]["function"]["arguments"] == told


@pytest.mark.parametrize("signature", [{}, {"signature": None}, {"signature": ""}, {"signature": "xyz"}], ids=str)
def test_thoughts_need_no_signature(signature: dict[str, Any]) -> None:
    thoughts = {"type": "thinking", "thinking": "Hm."} | signature
    assert said(("assistant", [thoughts, text("Yes")]))[0]["reasoning_content"] == "Hm."


def test_a_tool_reference_in_a_result_is_the_name_of_the_tool() -> None:
    found = RESULT | {"content": [{"type": "tool_reference", "tool_name": "weather"}, text("and more")]}
    assert said(("user", [found]))[0]["content"] == "weather\nand more"


def test_thoughts_of_older_turns_can_be_cleared() -> None:
    def thoughtful(words: str) -> tuple[str, Any]:
        return ("assistant", [{"type": "thinking", "thinking": words}, text("Yes")])

    messages = said(thoughtful("a"), ("user", "1"), ("assistant", "No"), ("user", "2"), thoughtful("b"))
    kept = {
        count: [m["reasoning_content"] for m in clear_thoughts(messages, count) if m.get("reasoning_content")]
        for count in (1, 2, 3)
    }
    assert kept == {1: ["b"], 2: ["a", "b"], 3: ["a", "b"]}
    assert [m["content"] for m in clear_thoughts(messages, 1)] == ["Yes", "1", "No", "2", "Yes"]
