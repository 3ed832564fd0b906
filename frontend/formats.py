"""Know how a model writes thoughts and tool calls, and open the parser that reads one answer."""

from dataclasses import dataclass

from kvmesh.frontend.parsers import harmony
from kvmesh.frontend.parsers.allowed import AllowedCalls
from kvmesh.frontend.parsers.chain import ChainedParser
from kvmesh.frontend.parsers.events import Parser
from kvmesh.frontend.parsers.harmony import is_harmony
from kvmesh.frontend.parsers.ids import ShortIds
from kvmesh.frontend.parsers.reasoning import (
    ReasoningFormat,
    guess_reasoning_format,
    open_after,
    reasoning_format,
)
from kvmesh.frontend.parsers.sound import SoundEvents
from kvmesh.frontend.parsers.tools import (
    ToolFormat,
    forced_arguments,
    forced_calls,
    guess_tool_format,
    tool_format,
)
from kvmesh.frontend.request import ToolChoice, Tools
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.parsers import HARMONY, NONE, reasoning_parser_name, tool_parser_name


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Says what one model writes beside prose."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    is_harmony: bool = False  # thoughts, calls and prose in channels

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that a parser has to see."""
        if self.is_harmony:
            return frozenset(harmony.HARMONY.markers)
        found: set[str] = set()
        if self.tools is not None:
            found.update(self.tools.markers)
        if self.reasoning is not None:
            found.update(self.reasoning.markers)
        return frozenset(found)

    def parser(self, tools: Tools | None, prompt_tail: str, *, is_guided: bool) -> Parser | None:
        """Return the parser of one answer, None if all of it is prose. `prompt_tail` is the end of the rendered prompt.

        An answer that is held to a format from its first token on has no room for thoughts.

        Raises InvalidRequestError if the model has no format for calls.
        """
        if self.is_harmony and not is_guided:
            return _limited(harmony.HARMONY.open(False), tools)
        thoughts = None if is_guided else self._thoughts(prompt_tail)
        calls = self._calls(tools)
        if calls is not None and self.tools is not None and self.tools.short_ids:
            calls = ShortIds(calls)
        if thoughts is not None and calls is not None:
            return ChainedParser(thoughts, calls)
        if thoughts is not None and self.tools is not None and self.tools.special:
            return SoundEvents(thoughts, self.tools.special)
        return thoughts or calls

    def _thoughts(self, prompt_tail: str) -> Parser | None:
        if self.reasoning is None:
            return None
        return open_after(self.reasoning, prompt_tail)

    def _calls(self, tools: Tools | None) -> Parser | None:
        if tools is None:
            return None
        if tools.choice is ToolChoice.NAMED:
            return forced_arguments(tools.named)
        if tools.choice is ToolChoice.REQUIRED:
            return forced_calls()
        if self.tools is None:
            raise InvalidRequestError(
                "The parameter 'tools' is not supported: it is not known how this model writes calls",
                hint="start its workers with --tool-parser, or send tool_choice 'required' or 'none'",
                param="tools",
            )
        return _limited(self.tools.open(tools.functions), tools)


def _limited(parser: Parser, tools: Tools | None) -> Parser:
    """Return the parser, which reports no call of a tool that is shown and may not be called."""
    if tools is None or not tools.is_limited:
        return parser
    return AllowedCalls(parser, frozenset([tool.name for tool in tools.functions]))


def answer_format(tool_parser: str, reasoning_parser: str, template_source: str) -> AnswerFormat:
    """Return the format by the names that a worker gives, or guessed from its chat template where it gives none.

    Raise ConfigError for a name that is not known.
    """
    tools, thoughts = tool_parser_name(tool_parser), reasoning_parser_name(reasoning_parser)
    if HARMONY in (tools, thoughts) or (not tools and not thoughts and is_harmony(template_source)):
        return AnswerFormat(is_harmony=True)
    tools = tools or guess_tool_format(template_source)
    thoughts = thoughts or guess_reasoning_format(template_source)
    return AnswerFormat(
        tools=tool_format(tools) if tools not in ("", NONE) else None,
        reasoning=reasoning_format(thoughts) if thoughts not in ("", NONE) else None,
    )
