"""Know how models write calls of tools, by the name of the format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvmesh.frontend.parsers.events import Parser, Tool
from kvmesh.frontend.parsers.tools.headed import DeepseekCalls, KimiCalls, MistralCalls
from kvmesh.frontend.parsers.tools.objects import ArgumentsAsJson, CallsAsJson, HermesCalls, LlamaCalls
from kvmesh.frontend.parsers.tools.pythonic import PythonicCalls
from kvmesh.frontend.parsers.tools.schema import named_schema, required_schema
from kvmesh.frontend.parsers.tools.tagged import GlmCalls, QwenCoderCalls
from kvmesh.protocol.parsers import tool_parser_name

__all__ = [
    "TOOL_PARSERS",
    "ArgumentsAsJson",
    "CallsAsJson",
    "ToolFormat",
    "guess_tool_format",
    "named_schema",
    "required_schema",
    "tool_format",
]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    open: Callable[[Sequence[Tool]], Parser]  # for one answer, by the tools of its request
    markers: tuple[str, ...]  # special tokens that the parser has to see
    short_ids: bool = False  # of calls: nine letters and digits


_FORMATS = (
    ToolFormat("hermes", lambda tools: HermesCalls(), ("<tool_call>", "</tool_call>")),
    ToolFormat("llama3_json", LlamaCalls, ("<|python_tag|>", "<|python_start|>", "<|python_end|>")),
    ToolFormat("mistral", lambda tools: MistralCalls(), ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), short_ids=True),
    ToolFormat(
        "deepseek_v3",
        lambda tools: DeepseekCalls(),
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    ToolFormat(
        "pythonic",
        PythonicCalls,
        ("<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    ToolFormat("qwen3_coder", QwenCoderCalls, ("<tool_call>", "</tool_call>")),
    ToolFormat(
        "kimi_k2",
        lambda tools: KimiCalls(),
        (
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    ToolFormat(
        "glm45",
        GlmCalls,
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
)
TOOL_PARSERS: Mapping[str, ToolFormat] = MappingProxyType({format_.name: format_ for format_ in _FORMATS})

# (all of these stand in the chat template, its format), the first that fits
_SIGNS = (
    (("<｜tool▁calls▁begin｜>",), "deepseek_v3"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<arg_key>", "<tool_call>"), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>", "</tool_call>"), "hermes"),
    (("[func_name1(",), "pythonic"),
    (("<|tool_call_start|>",), "pythonic"),
    (('{"name": function name, "parameters": ',), "llama3_json"),
    (("<|python_start|>",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
)


def tool_format(name: str) -> ToolFormat:
    """Return the format by its name or an alias. Raise ConfigError, which lists the names."""
    return TOOL_PARSERS[tool_parser_name(name)]


def guess_tool_format(template_source: str) -> str:
    """The format that a chat template shows the model, "" if none fits."""
    for signs, name in _SIGNS:
        if all(sign in template_source for sign in signs):
            return name
    return ""
