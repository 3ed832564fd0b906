"""Know how models write calls of tools, by the name of the format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvmesh.frontend.parsers.events import Parser, Tool
from kvmesh.frontend.parsers.sound import SoundEvents
from kvmesh.frontend.parsers.tools.headed import (
    DEEPSEEK_MARKERS,
    KIMI_MARKERS,
    DeepseekCalls,
    KimiCalls,
    MistralCalls,
)
from kvmesh.frontend.parsers.tools.objects import ArgumentsAsJson, CallsAsJson, HermesCalls, LlamaCalls
from kvmesh.frontend.parsers.tools.pythonic import PythonicCalls
from kvmesh.frontend.parsers.tools.schema import named_schema, required_schema, without_annotations
from kvmesh.frontend.parsers.tools.tagged import GlmCalls, QwenCoderCalls, SeedCalls
from kvmesh.protocol.parsers import tool_parser_name

__all__ = [
    "TOOL_PARSERS",
    "ToolFormat",
    "forced_arguments",
    "forced_calls",
    "guess_tool_format",
    "named_schema",
    "required_schema",
    "tool_format",
    "without_annotations",
]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    read: Callable[[Sequence[Tool]], Parser]  # for one answer, by the tools of its request
    markers: tuple[str, ...]  # special tokens that the parser has to see
    short_ids: bool = False  # of calls: nine letters and digits

    @property
    def special(self) -> tuple[str, ...]:
        """Return the markers that no prose may hold. Tags may stand in prose: models and users talk of them."""
        return tuple([marker for marker in self.markers if marker[0] == "[" or "|" in marker or "｜" in marker])

    def open(self, tools: Sequence[Tool]) -> Parser:
        return SoundEvents(self.read(tools), self.special)


_FORMATS = (
    ToolFormat("hermes", lambda tools: HermesCalls(), ("<tool_call>", "</tool_call>")),
    ToolFormat("llama3_json", LlamaCalls, ("<|python_tag|>", "<|python_start|>", "<|python_end|>")),
    ToolFormat("mistral", lambda tools: MistralCalls(), ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), short_ids=True),
    ToolFormat("deepseek_v3", lambda tools: DeepseekCalls(), DEEPSEEK_MARKERS),
    ToolFormat(
        "pythonic",
        PythonicCalls,
        ("<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    ToolFormat("qwen3_coder", QwenCoderCalls, ("<tool_call>", "</tool_call>")),
    ToolFormat("kimi_k2", lambda tools: KimiCalls(), KIMI_MARKERS),
    ToolFormat(
        "glm45",
        GlmCalls,
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolFormat("seed_oss", SeedCalls, ("<seed:tool_call>", "</seed:tool_call>")),
)
TOOL_PARSERS: Mapping[str, ToolFormat] = MappingProxyType({format_.name: format_ for format_ in _FORMATS})

# (all of these stand in the chat template, its format), the first that fits
_SIGNS = (
    (("<｜tool▁calls▁begin｜>",), "deepseek_v3"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<arg_key>", "<tool_call>"), "glm45"),
    (("<seed:tool_call>",), "seed_oss"),
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


def forced_calls() -> Parser:
    """Open the parser of an answer that is held to `required_schema`."""
    return SoundEvents(CallsAsJson(), (), is_forced=True)


def forced_arguments(name: str) -> Parser:
    """Open the parser of an answer that is held to `named_schema`."""
    return SoundEvents(ArgumentsAsJson(name), (), is_forced=True)
