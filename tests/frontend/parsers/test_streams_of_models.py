"""Whole answers as models of each family write them, read as the frontend does: thoughts, then prose and calls."""

from typing import Any, NamedTuple

import msgspec
import pytest

from kvmesh.frontend.parsers.chain import ChainedParser, merge
from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Parser, Reasoning, Tool
from kvmesh.frontend.parsers.harmony import HARMONY
from kvmesh.frontend.parsers.reasoning import open_after, reasoning_format
from kvmesh.frontend.parsers.tools import tool_format
from tests.frontend.parsers.streams import run

TOOLS = (
    Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    Tool("now", {"type": "object", "properties": {}}),
)
CHATML = "<|im_end|>\n<|im_start|>assistant\n"


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]
    id: str | None = None


class Stream(NamedTuple):
    model: str
    reasoning: str  # a format's name
    tools: str
    prompt_tail: str
    answer: str
    expected: list[Content | Reasoning | Call]


STREAMS = (
    Stream(
        "Qwen3, thinking",
        "qwen3",
        "hermes",
        CHATML,
        "<think>\nTwo cities: Köln {and} Rome.\n\nCall twice.\n</think>\n\nI look it up.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome }"}}\n</tool_call>',
        [
            Reasoning("Two cities: Köln {and} Rome.\n\nCall twice."),
            Content("I look it up.\n"),
            Call("get_weather", {"city": "Köln"}),
            Call("get_weather", {"city": "Rome }"}),
        ],
    ),
    Stream(
        "Qwen3, thinking switched off",
        "qwen3",
        "hermes",
        f"{CHATML}<think>\n\n</think>\n\n",
        "In HTML you would write <b>bold</b>; models write <think>.",
        [Content("In HTML you would write <b>bold</b>; models write <think>.")],
    ),
    Stream(
        "Qwen3-Thinking-2507, which begins inside its thoughts",
        "qwen3",
        "hermes",
        f"{CHATML}<think>\n",
        "Okay: 2 < 3.\n</think>\n\nYes.",
        [Reasoning("Okay: 2 < 3."), Content("Yes.")],
    ),
    Stream(
        "Qwen3.5, which calls without having ended its thoughts",
        "qwen3",
        "qwen3_coder",
        f"{CHATML}<think>\n",
        "I need the <tool_call> tag now.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [Reasoning("I need the <tool_call> tag now."), Call("get_weather", {"city": "Rome", "days": 3})],
    ),
    Stream(
        "DeepSeek-R1",
        "deepseek_r1",
        "deepseek_v3",
        "<｜Assistant｜><think>\n",
        "The user wants Rome.\n</think>\n\nLet me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        'get_weather\n```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [Reasoning("The user wants Rome."), Content("Let me see."), Call("get_weather", {"city": "Rome"})],
    ),
    Stream(
        "DeepSeek-R1-0528, which writes its start tag",
        "deepseek_r1",
        "deepseek_v3",
        "<｜Assistant｜>",
        "<think>\nEasy.\n</think>\n\n42",
        [Reasoning("Easy."), Content("42")],
    ),
    Stream(
        "DeepSeek-V3.1, not thinking",
        "think",
        "deepseek_v3",
        "<｜Assistant｜></think>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [Call("now", {}), Call("get_weather", {"city": "Rome"})],
    ),
    Stream(
        "GLM-4.5",
        "glm45",
        "glm45",
        "<|assistant|>",
        "\n<think>Weather, then.</think>\nI check.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        [
            Reasoning("Weather, then."),
            Content("I check.\n"),
            Call("get_weather", {"city": "Rome", "days": 2}),
        ],
    ),
    Stream(
        "GLM-4.5, not thinking",
        "glm45",
        "glm45",
        "<|assistant|>\n<think></think>",
        "\nHello!",
        [Content("\nHello!")],
    ),
    Stream(
        "Kimi-K2-Thinking",
        "kimi_k2",
        "kimi_k2",
        "<|im_assistant|>assistant<|im_middle|>",
        "<think>The user asks.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
        [
            Reasoning("The user asks."),
            Content("I look."),
            Call("get_weather", {"city": "Rome"}, "functions.get_weather:0"),
        ],
    ),
    Stream(
        "Kimi-K2.5, which calls without having ended its thoughts",
        "kimi_k2",
        "kimi_k2",
        "<|im_assistant|>assistant<|im_middle|><think>",
        "The user asks.\n<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        [Reasoning("The user asks."), Call("now", {}, "functions.now:3")],
    ),
    Stream(
        "Kimi-Dev",
        "kimi",
        "hermes",
        "<|im_assistant|>assistant<|im_middle|>",
        "◁think▷Is 7 < 8? ◁ Yes.◁/think▷Yes.",
        [Reasoning("Is 7 < 8? ◁ Yes."), Content("Yes.")],
    ),
    Stream(
        "Magistral",
        "mistral",
        "mistral",
        "[/INST]",
        '[THINK]I [could] call.[/THINK]Un instant.[TOOL_CALLS]get_weather[ARGS]{"city": "Orléans"}'
        "[TOOL_CALLS]now[ARGS]{}",
        [
            Reasoning("I [could] call."),
            Content("Un instant."),
            Call("get_weather", {"city": "Orléans"}),
            Call("now", {}),
        ],
    ),
    Stream(
        "Granite 3.2",
        "granite",
        "hermes",
        "<|start_of_role|>assistant<|end_of_role|>",
        "Here is my thought process:\n\nHere is what I know: 6 * 7.\n\nHere is my response:\n\n42",
        [Reasoning("Here is what I know: 6 * 7."), Content("42")],
    ),
    Stream(
        "Step3",
        "step3",
        "hermes",
        "<|EOT|><|BOT|>assistant\n<think>\n",
        "A cat.\n</think>\n\nIt is a cat.",
        [Reasoning("A cat."), Content("It is a cat.")],
    ),
    Stream(
        "Nemotron 3",
        "nemotron",
        "qwen3_coder",
        f"{CHATML}<think>\n",
        "The time.\n</think>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [Reasoning("The time."), Call("now", {})],
    ),
    Stream(
        "Nemotron 3, not thinking",
        "nemotron",
        "qwen3_coder",
        f"{CHATML}<think></think>",
        "Noon.",
        [Content("Noon.")],
    ),
    Stream(
        "an answer cut off within its thoughts",
        "qwen3",
        "hermes",
        CHATML,
        "<think>\nOn the one hand,\n",
        [Reasoning("On the one hand,\n")],
    ),
    Stream(
        "gpt-oss",
        "harmony",
        "",
        "<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        '<|message|>{"city":"Rome"}<|call|>',
        [Reasoning("Need the weather."), Content("I look it up."), Call("get_weather", {"city": "Rome"})],
    ),
)
every_stream = pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.model)


def parser_for(stream: Stream) -> Parser:
    if stream.reasoning == "harmony":
        return open_after(HARMONY, stream.prompt_tail)
    thoughts = open_after(reasoning_format(stream.reasoning), stream.prompt_tail)
    return ChainedParser(thoughts, tool_format(stream.tools).open(TOOLS))


def parts(events: list[Event]) -> list[Content | Reasoning | Call]:
    """The events with each call in one; its arguments must be JSON."""
    found: list[Content | Reasoning | Call] = []
    begun: dict[int, CallBegun] = {}
    for event in merge(events):
        match event:
            case CallBegun(index):
                assert index == len(begun)
                begun[index] = event
            case CallArguments(index, fragment):
                call = begun[index]
                found.append(Call(call.name, msgspec.json.decode(fragment), call.id))
            case _:
                found.append(event)
    return found


@every_stream
def test_an_answer_is_read_as_its_model_means_it(stream: Stream) -> None:
    assert parts(run(parser_for(stream), [stream.answer])) == stream.expected


@every_stream
@pytest.mark.parametrize("piece_chars", [1, 2, 3, 5, 8, 13])
def test_and_in_pieces_of_any_size(stream: Stream, piece_chars: int) -> None:
    pieces = [stream.answer[at : at + piece_chars] for at in range(0, len(stream.answer), piece_chars)]
    assert run(parser_for(stream), pieces) == run(parser_for(stream), [stream.answer])
