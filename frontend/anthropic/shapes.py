"""Anthropic's wire shapes for messages: what comes in, what goes out.

Fields that are known but not supported are here as well, so that they can be refused by name
(`parse.PROMPT_DEFAULTS` and so on); a field that is not here is unknown and refused by the decoder.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from kvmesh.frontend.shapes import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    MAX_U32,
    MAX_USER_CHARS,
    Count,
    KvmeshOptions,
    Lenient,
    ModelName,
    Salt,
    StopString,
    Strict,
    TopP,
    TraceReport,
)

LEAST_BUDGET_TOKENS = 1024

ToolName = Annotated[str, Meta(min_length=1, max_length=128)]


class TextBlock(Lenient, frozen=True, tag_field="type", tag="text"):
    text: str
    cache_control: Any = None  # ignored here and below: prefixes are cached anyway
    citations: list[Any] | None = None  # ignored: sources of an earlier answer


class OnlyText(Lenient, frozen=True):
    """A text block where no other may stand."""

    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: list[Any] | None = None


class ThinkingBlock(Lenient, frozen=True, tag_field="type", tag="thinking"):
    """Thoughts of an earlier answer."""

    thinking: str
    signature: str | None = None  # not looked at: thoughts are not signed here


class RedactedThinkingBlock(Lenient, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Thoughts that nobody but Anthropic can read; dropped."""

    data: str


class DirectCaller(Lenient, frozen=True):
    """The model has made the call itself, and no code that it runs."""

    type: Literal["direct"]


DIRECT = DirectCaller(type="direct")


class ToolUseBlock(Lenient, frozen=True, tag_field="type", tag="tool_use"):
    """A call that the model made in an earlier answer."""

    id: str
    name: str
    input: dict[str, Any] | str | None = None  # text is what a cut-off answer left: see `conversation.input_of`
    caller: DirectCaller | None = None
    toolset_name: None = None
    cache_control: Any = None


class ResultText(Lenient, frozen=True, tag_field="type", tag="text"):
    text: str
    cache_control: Any = None
    citations: list[Any] | None = None


class ToolReference(Lenient, frozen=True, tag_field="type", tag="tool_reference"):
    """A search for tools has found this tool, which the model knows from then on."""

    tool_name: str
    cache_control: Any = None


class ToolResultBlock(Lenient, frozen=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[ResultText | ToolReference] | None = None
    is_error: bool | None = None
    toolset_name: None = None
    cache_control: Any = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class Message(Lenient, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolSpec(Lenient, frozen=True):
    """A tool that the caller runs."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None  # a forced call always keeps to the schema, a free one is the model's own
    eager_input_streaming: bool | None = None  # ignored: arguments are always streamed as they are generated
    cache_control: Any = None
    defer_loading: bool | None = None  # the model knows the tool once a tool_reference in a result names it
    allowed_callers: list[str] | None = None  # the model has to be one of them ("direct")
    input_examples: list[dict[str, Any]] | None = None  # the model reads them as `examples` of the schema


class AutoChoice(Strict, frozen=True, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Strict, frozen=True, tag_field="type", tag="any"):
    """At least one call."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(Strict, frozen=True, tag_field="type", tag="tool"):
    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoChoice(Strict, frozen=True, tag_field="type", tag="none"):
    """No call."""


Display = Literal["summarized", "omitted", "updates"]  # of these only "omitted" changes the answer


class ThinkingEnabled(Strict, frozen=True, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=LEAST_BUDGET_TOKENS, le=MAX_U32)]
    display: Display | None = None
    block_binding: Any = None  # ignored here and below: thoughts are bound to no conversation


class ThinkingAdaptive(Strict, frozen=True, tag_field="type", tag="adaptive"):
    """The model decides how much it thinks."""

    display: Display | None = None
    block_binding: Any = None


class ThinkingDisabled(Strict, frozen=True, tag_field="type", tag="disabled"):
    display: None = None


class ThinkingBetweenTools(Strict, frozen=True, tag_field="type", tag="between_tools"):
    """Refused by name."""


Thinking = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | ThinkingBetweenTools


class JsonSchemaFormat(Strict, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Strict, frozen=True):
    effort: Annotated[str, Meta(max_length=32)] | None = None  # a chat template may read it: `reasoning_effort`
    format: JsonSchemaFormat | None = None
    task_budget: Any = None  # ignored: a hint for models that plan with it


class AllTurns(Strict, frozen=True, tag_field="type", tag="all"):
    """Keep the thoughts of every turn."""


class LatestTurns(Strict, frozen=True, tag_field="type", tag="thinking_turns"):
    """Keep the thoughts of the latest turns that have any."""

    value: Annotated[int, Meta(ge=1)]


class ClearThinking(Strict, frozen=True):
    """Drop the thoughts of older turns from the prompt."""

    type: Literal["clear_thinking_20251015"]
    keep: AllTurns | LatestTurns | Literal["all"] | None = None  # null: those of the latest turn


class ContextManagement(Strict, frozen=True):
    """Edits of the conversation before the model reads it."""

    edits: list[ClearThinking] | None = None


class Metadata(Strict, frozen=True):
    user_id: Annotated[str, Meta(max_length=MAX_USER_CHARS)] | None = None  # names the session


class CountRequest(Strict, frozen=True):
    """Hold what the model reads: the body of count_tokens and the larger part of any request."""

    model: ModelName
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[OnlyText] | None = None
    tools: Annotated[list[ToolSpec], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonSchemaFormat | None = None  # the older name of output_config.format
    context_management: ContextManagement | None = None
    cache_salt: Salt | None = None  # ours
    cache_control: Any = None
    compaction: Any = None  # counting ignores it, as Anthropic does
    # supported for their default only
    speed: str | None = None
    mcp_servers: list[Any] | None = None
    billing_policy: Any = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_U32)] | None = None  # 0: all
    metadata: Metadata | None = None
    kvmesh: KvmeshOptions | None = None  # ours
    diagnostics: Any = None  # ignored: answers name no reason for a cache miss
    thread: Any = None  # refused in such a way that clients send the whole conversation instead
    # supported for their default only
    service_tier: str | None = None
    container: Any = None
    inference_geo: str | None = None
    user_profile_id: str | None = None
    fallbacks: Any = None
    fallback_credit_token: Any = None


# --- answers ------------------------------------------------------------------------------------------


class AnswerText(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class AnswerThinking(Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class AnswerToolUse(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]
    caller: DirectCaller = DIRECT


AnswerBlock = AnswerThinking | AnswerText | AnswerToolUse


class UsageSoFar(Struct, frozen=True, kw_only=True):
    """The prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class CacheCreation(Struct, frozen=True):
    """Tokens that were written to a cache which is paid for by time: there is none here."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


NO_CACHE_CREATION = CacheCreation()


class Usage(UsageSoFar, frozen=True, kw_only=True):
    """The usage in `message_start` and in a whole answer."""

    cache_creation: CacheCreation = NO_CACHE_CREATION
    service_tier: str = "standard"


class Answer(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: str = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None  # null in message_start alone
    stop_sequence: str | None
    stop_details: None = None
    usage: Usage
    kvmesh: TraceReport | UnsetType = UNSET


class TokenCount(Struct, frozen=True):
    input_tokens: int


class ModelInfo(Struct, frozen=True, kw_only=True, tag_field="type", tag="model"):
    id: str
    display_name: str
    created_at: datetime
    lifecycle: str = "active"
    max_input_tokens: int
    max_tokens: int
    capabilities: None = None  # nobody has told what the model is good at
    deprecated_at: None = None
    retires_at: None = None
    line: None = None


class ModelPage(Struct, frozen=True, kw_only=True):
    data: Sequence[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ErrorReason(Struct, frozen=True):
    """The reason of an error, for clients that know what to do about it."""

    error_code: str


class ErrorDetail(Struct, frozen=True):
    type: str
    message: str
    details: ErrorReason | UnsetType = UNSET


class ErrorAnswer(Struct, frozen=True, tag_field="type", tag="error"):
    error: ErrorDetail
    request_id: str | UnsetType = UNSET


# --- the events of a stream, as `dialect.MessagesWriter` writes them -----------------------------------


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    message: Answer


class BlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class Ending(Struct, frozen=True):
    stop_reason: str | None
    stop_sequence: str | None
    stop_details: None = None


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: Ending
    usage: UsageSoFar


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    kvmesh: TraceReport | UnsetType = UNSET


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | ErrorAnswer
