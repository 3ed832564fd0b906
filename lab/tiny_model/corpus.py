"""The training text: an endless, seeded stream of stories, chats, tool calls and JSON, all of it made by this package.

The same seed gives the same documents, so a checkpoint can be made again from the repository alone.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmesh.lab.tiny_model.chats import ChatMessage, conversation, turn_messages
from kvmesh.lab.tiny_model.copying import copying_turn
from kvmesh.lab.tiny_model.json_answers import bare_json, json_conversation
from kvmesh.lab.tiny_model.stories import draw_world, tell
from kvmesh.lab.tiny_model.tool_chats import tool_conversation
from kvmesh.lab.tiny_model.tool_tasks import JsonValue, compact

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
ANSWER = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)  # what is learned of a chat with tools
MAX_DESCRIPTION_CHARS = 120  # of a tool's description the template shows the first line, at most so much

_PLAIN_SHARE = 0.1  # part of the prose that is a story without a chat around it
_BARE_JSON_SHARE = 0.2  # part of the JSON without a chat around it


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    answers_only: bool = False  # only what the assistant says is learned: specs and values are made up at random


def prose_documents(seed: int) -> Iterator[Document]:
    """Yield stories and chats without end, each closed by `END_OF_TEXT`. The tokenizer is trained on them alone."""
    rng = random.Random(seed)
    while True:
        yield Document(prose_document(rng) + END_OF_TEXT)


def copying_documents(seed: int) -> Iterator[Document]:
    """Yield exercises in copying without end."""
    rng = random.Random(seed)
    while True:
        yield Document(render(turn_messages(rng, copying_turn(rng))), answers_only=True)


def short_documents(seed: int) -> Iterator[Document]:
    """Yield short documents without end: exercises in copying, chats with few tools, and some prose."""
    rng, prose = random.Random(seed), prose_documents(seed)
    while True:
        kind = rng.random()
        if kind < 0.6:
            turns = [copying_turn(rng) for _ in range(rng.choice((1, 2)))]
            messages = [message for turn in turns for message in turn_messages(rng, turn)]
            yield Document(render(messages) + END_OF_TEXT, answers_only=True)
        elif kind < 0.9:
            yield Document(render(*tool_conversation(rng, others=(0, 0, 0, 1))) + END_OF_TEXT, answers_only=True)
        else:
            yield next(prose)


def all_documents(seed: int) -> Iterator[Document]:
    """Yield documents of all kinds without end: chats with tools, JSON, exercises in copying, and prose."""
    rng, prose, copying = random.Random(seed), prose_documents(seed), copying_documents(seed)
    while True:
        kind = rng.random()
        if kind < 0.45:
            yield Document(render(*tool_conversation(rng)) + END_OF_TEXT, answers_only=True)
        elif kind < 0.58:
            yield json_document(rng)
        elif kind < 0.62:
            yield next(copying)
        else:
            yield next(prose)


def prose_document(rng: random.Random) -> str:
    if rng.random() < _PLAIN_SHARE:
        return tell(rng, draw_world(rng), long=rng.random() < 0.4).text
    return render(conversation(rng))


def json_document(rng: random.Random) -> Document:
    if rng.random() < _BARE_JSON_SHARE:
        return Document(bare_json(rng) + END_OF_TEXT)
    return Document(render(json_conversation(rng)) + END_OF_TEXT, answers_only=True)


# --- as the checkpoint's chat template renders ----------------------------------------------------------


def render(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the ChatML text of `messages`. `tools` are functions: they stand at the end of the system message."""
    turns = list(messages)
    if tools:
        given = turns.pop(0)["content"] + "\n\n" if turns[:1] and turns[0]["role"] == "system" else ""
        block = "".join("\n" + tool_line(tool) for tool in tools)
        turns.insert(0, {"role": "system", "content": f"{given}Tools:{block}"})
    return "".join(f"{TURN_START}{m['role']}\n{m['content']}{calls_text(m)}{TURN_END}\n" for m in turns)


def tool_line(tool: Mapping[str, Any]) -> str:
    """Return a tool as one line: its name, the first line of its description, and the types of its arguments."""
    text = str(tool.get("description", "")).strip().split("\n")[0][:MAX_DESCRIPTION_CHARS]
    required = tool["parameters"]["required"]
    types: JsonValue = {
        key: argument_type(schema) + ("" if key in required else "?")
        for key, schema in tool["parameters"]["properties"].items()
    }
    described = {"description": text} if text else {}
    return compact({"name": tool["name"], **described, "parameters": types})


def argument_type(schema: Mapping[str, Any]) -> str:
    return "|".join(schema["enum"]) if "enum" in schema else str(schema["type"])


def calls_text(message: ChatMessage) -> str:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return "".join(
        f"<tool_call>{compact({'name': f['name'], 'arguments': f['arguments']})}</tool_call>" for f in functions
    )
