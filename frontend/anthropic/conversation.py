"""Turns of content blocks to messages as chat templates want them. Pure.

Turns of one role that follow each other are one, as Anthropic has it. The result of a tool becomes a message of its
own, with the name of the tool that was called. Text blocks of a user are joined by line breaks, as chats join parts;
those of the assistant as they are, so that an answer that is sent back is again the text that was generated.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple, NoReturn

import msgspec

from kvmesh.frontend.anthropic.shapes import (
    Block,
    Message,
    OnlyText,
    RedactedThinkingBlock,
    ResultText,
    TextBlock,
    ThinkingBlock,
    ToolReference,
    ToolResultBlock,
    ToolUseBlock,
)
from kvmesh.frontend.bodies import refuse
from kvmesh.frontend.template_probes import ChatMessage
from kvmesh.protocol.messages import UNREADABLE

INVALID_JSON: Final = "INVALID_JSON"  # Anthropic's key for arguments that are no JSON object
FAILED = "Error: "  # before the result of a tool that failed: templates know no other way to say it

_object_decoder = msgspec.json.Decoder(dict[str, Any])


class _Placed(NamedTuple):
    where: str  # its path in the body
    block: Block


def chat_messages(system: str | Sequence[OnlyText] | None, messages: Sequence[Message]) -> list[ChatMessage]:
    """Raises InvalidRequestError that names the block which stands where it cannot."""
    said: list[ChatMessage] = []
    if prompt := _text(system):
        said.append({"role": "system", "content": prompt})
    names: dict[str, str] = {}  # of the tools called so far, by the call's id
    for role, turns in groupby(enumerate(messages), key=lambda turn: turn[1].role):
        blocks = [placed for index, message in turns for placed in _blocks(message, index)]
        match role:
            case "assistant":
                said.append(_assistant(blocks, names))
            case "user":
                said += _user(blocks, names)
            case _:
                said.append({"role": role, "content": _text([_text_block(placed, role) for placed in blocks])})
    return said


def continues(said: Sequence[ChatMessage]) -> bool:
    """Return whether the answer continues the last message. Raise InvalidRequestError if it cannot."""
    last = said[-1]
    if last["role"] != "assistant":
        return False
    if last["tool_calls"]:
        refuse("messages", "the last message calls tools; send their results after it")
    text = last["content"] or ""
    if text != text.rstrip():
        refuse("messages", "the last message, which the answer goes on with, ends with white space")
    if not text:
        refuse("messages", "the last message is the assistant's, and has no text that the answer could go on with")
    return True


def _blocks(message: Message, index: int) -> list[_Placed]:
    where = f"messages[{index}].content"
    if isinstance(message.content, str):
        return [_Placed(where, TextBlock(text=message.content))]
    if not message.content and message.role != "assistant":  # an answer may have been empty
        refuse(where, "it is empty")
    return [_Placed(f"{where}[{n}]", block) for n, block in enumerate(message.content)]


def _user(blocks: Iterable[_Placed], names: dict[str, str]) -> list[ChatMessage]:
    """Results and texts in their order."""
    said: list[ChatMessage] = []
    for is_result, group in groupby(blocks, key=lambda placed: isinstance(placed.block, ToolResultBlock)):
        if is_result:
            said += [_result(placed.block, names) for placed in group if isinstance(placed.block, ToolResultBlock)]
        else:
            said.append({"role": "user", "content": _text([_text_block(placed, "user") for placed in group])})
    return said


def _result(block: ToolResultBlock, names: dict[str, str]) -> ChatMessage:
    text = _text(block.content)
    return {
        "role": "tool",
        "content": FAILED + text if block.is_error else text,
        "tool_call_id": block.tool_use_id,
        "name": names.get(block.tool_use_id),
    }


def _assistant(blocks: Iterable[_Placed], names: dict[str, str]) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                names[block.id] = block.name
                calls.append(_call(block))
            case ToolResultBlock():
                _misplaced(where, block, "assistant")
    return {
        "role": "assistant",
        "content": None if calls and not texts else "".join(texts),
        "reasoning_content": "".join(thoughts) or None,
        "tool_calls": calls or None,
    }


def _call(block: ToolUseBlock) -> dict[str, Any]:
    """Templates write arguments with `tojson` and so want the object, not its JSON."""
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": input_of(block)}}


def input_of(block: ToolUseBlock) -> dict[str, Any]:
    """Return the arguments as an object; what a cut-off call left of them is kept under Anthropic's key for it."""
    if not isinstance(block.input, str):
        return block.input or {}
    try:
        return _object_decoder.decode(block.input or "{}")
    except UNREADABLE:
        return {INVALID_JSON: block.input}


def found_tools(messages: Sequence[Message]) -> frozenset[str]:
    """Return the names of the tools that a search has found in the conversation."""
    results = [
        block
        for message in messages
        if isinstance(message.content, list)
        for block in message.content
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list)
    ]
    return frozenset(
        part.tool_name for block in results for part in block.content or () if isinstance(part, ToolReference)
    )


def clear_thoughts(said: Sequence[ChatMessage], kept: int) -> list[ChatMessage]:
    """Return the messages without thoughts, except the latest `kept` that have any."""
    thoughtful = [index for index, message in enumerate(said) if message.get("reasoning_content")]
    cleared = frozenset(thoughtful[: len(thoughtful) - kept]) if len(thoughtful) > kept else frozenset[int]()
    return [
        {**message, "reasoning_content": None} if index in cleared else message for index, message in enumerate(said)
    ]


def _text_block(placed: _Placed, role: str) -> TextBlock:
    if not isinstance(placed.block, TextBlock):
        _misplaced(placed.where, placed.block, role)
    return placed.block


def _text(content: str | Sequence[TextBlock | OnlyText | ResultText | ToolReference] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join([block.tool_name if isinstance(block, ToolReference) else block.text for block in content])


def _misplaced(where: str, block: Block, role: str) -> NoReturn:
    refuse(f"{where}.type", f"{block.__struct_config__.tag!r} cannot stand in a message of the role {role!r}")
