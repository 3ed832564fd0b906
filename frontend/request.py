"""The data of a request: what a body asks for once it is read and checked, whatever its API's spelling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from kvmesh.frontend.generator import Hints
from kvmesh.frontend.parsers.events import Tool
from kvmesh.frontend.template_probes import ChatMessage
from kvmesh.protocol.messages import Guide, SamplingParams


class ToolChoice(StrEnum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"  # at least one call
    NAMED = "named"  # one call, of this function


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions a model may call in its answer."""

    functions: tuple[Tool, ...]  # which may be called
    shown: tuple[Mapping[str, Any], ...]  # as chat templates get them, in OpenAI's shape
    choice: ToolChoice = ToolChoice.AUTO
    named: str = ""
    parallel: bool = True
    is_limited: bool = False  # tools are shown that may not be called

    @property
    def is_free(self) -> bool:
        """Return whether the model decides if it calls, and writes calls in its own format."""
        return self.choice is ToolChoice.AUTO


class ParamNames(Struct, frozen=True):
    """The names by which an API's errors call parameters that all APIs have."""

    prompt: str  # what the model reads
    format: str = "response_format"  # what the answer is held to
    schema: str = "response_format.json_schema.schema"  # the schema in it
    tool_schema: str = "tools[{}].function.parameters"  # of a tool, by its number


class ParsedBody(Struct, frozen=True, kw_only=True):
    """Holds what every body asks for."""

    model: str
    cache_salt: str | None = None
    hints: Hints = field(default_factory=Hints)


class ParsedRequest(ParsedBody, frozen=True, kw_only=True):  # of all that is made per request, the most fields
    """A request for answers. Exactly one of `messages` and `prompts` is given; a prompt is text or token ids."""

    names: ParamNames
    messages: Sequence[ChatMessage] | None = None
    prompts: Sequence[str | Sequence[int]] = ()
    suffix: str = ""  # text that follows the answer
    echo: bool = False  # begin the answer with the prompt
    n: int = 1  # answers to each prompt
    best_of: int = 1  # >= n: of so many, the likeliest n
    stream: bool = False
    include_usage: bool = False
    is_usage_continuous: bool = False  # in every chunk
    sampling: SamplingParams = field(default_factory=SamplingParams)  # seed as asked for
    has_seed: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    guide: Guide | None = None
    tools: Tools | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)  # names that a chat template may read
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    trace: bool = False
