"""Promises about what models write, and what the files of a model hold: tool calls, thoughts, chat templates."""

import time
from collections.abc import Callable, Sequence

from kvmesh.frontend.parsers.allowed import AllowedCalls
from kvmesh.frontend.parsers.chain import ChainedParser, merge
from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Parser, Reasoning, Tool
from kvmesh.frontend.parsers.harmony import HARMONY
from kvmesh.frontend.parsers.reasoning import REASONING_PARSERS
from kvmesh.frontend.parsers.tools import TOOL_PARSERS, forced_arguments, forced_calls
from kvmesh.frontend.templates import ChatTemplate
from kvmesh.protocol.errors import ConfigError, InvalidRequestError

TOOLS = [
    Tool("f", {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "o": {}}}),
    Tool("g", {}),
]
Open = Callable[[], Parser]


def _tools(name: str) -> Open:
    return lambda: TOOL_PARSERS[name].open(TOOLS)


def _thoughts(name: str, is_open: bool) -> Open:
    return lambda: REASONING_PARSERS[name].open(is_open)


OPENERS: list[Open] = [
    *(_tools(name) for name in TOOL_PARSERS),
    *(_thoughts(name, is_open) for name in REASONING_PARSERS for is_open in (False, True)),
    lambda: HARMONY.open(False),
    forced_calls,
    lambda: forced_arguments("f"),
    lambda: ChainedParser(REASONING_PARSERS["qwen3"].open(False), TOOL_PARSERS["hermes"].open(TOOLS)),
    lambda: AllowedCalls(TOOL_PARSERS["hermes"].open(TOOLS), frozenset("g")),
]
MARKERS = sorted(
    {marker for known in (*TOOL_PARSERS.values(), *REASONING_PARSERS.values(), HARMONY) for marker in known.markers}
)


def parsers(data: bytes) -> None:
    """However the text is cut, a parser gives the same events, and prose and thoughts are parts of the text."""
    if len(data) < 2:
        return
    opener, cut, text = OPENERS[data[0] % len(OPENERS)], 1 + data[1] % 17, data[2:].decode("utf-8", "replace")
    whole = _run(opener(), [text])
    assert _run(opener(), [text[at : at + cut] for at in range(0, len(text), cut)]) == whole
    calls = 0
    for event in whole:
        match event:
            case CallBegun(index, name):
                assert index == calls and name
                calls += 1
            case CallArguments(index):
                assert index == calls - 1
            case Content(said) | Reasoning(said):
                assert len(said) <= 4 * len(text) + 200


def _run(parser: Parser, pieces: Sequence[str]) -> list[Event]:
    return merge([*(event for piece in pieces for event in parser.push(piece)), *parser.flush()])


CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a <b> c"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "r"},
]
MOST_RENDER_S = 20.0


def chat_templates(data: bytes) -> None:
    """A template compiles or is refused; rendering it ends soon, in bounded memory, with text or a refusal."""
    began = time.monotonic()
    try:
        template = ChatTemplate(data.decode("utf-8", "replace"), {"bos_token": "<s>"})
        text = template.render(CHAT, tools=[{"type": "function", "function": {"name": "f"}}], options={"n": 3})
        assert isinstance(text, str)
    except (ConfigError, InvalidRequestError):
        pass
    assert time.monotonic() - began < MOST_RENDER_S, "rendering took too long"
