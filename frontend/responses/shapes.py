"""The wire shapes of the Responses API: what comes in, what goes out, the events of a stream.

Input items, tools and the choice of a tool come in more kinds than are supported; they are read in two steps
(`parse`), so that another kind is refused by its name.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from kvmesh.frontend.openai.shapes import (
    ChatLogprob,
    FunctionName,
    Metadata,
    ReasoningEffort,
    RequestBase,
    SchemaName,
    ServiceTier,
    Verbosity,
)
from kvmesh.frontend.shapes import MAX_TOOLS, MAX_U32, Count, Lenient, Strict, TraceReport

MAX_INPUT_ITEMS = 1 << 16
LOGPROBS = "message.output_text.logprobs"  # what a caller has included to get them
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")  # the latter: thoughts are there, in plain text
TEXT_PARTS = ("input_text", "output_text")

SummaryKind = Literal["auto", "concise", "detailed"]
Included = Annotated[str, Meta(extra_json_schema={"enum": list(INCLUDABLE)})]
TextPartType = Annotated[str, Meta(extra_json_schema={"enum": list(TEXT_PARTS)})]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]

# --- the request --------------------------------------------------------------------------------------


class PlainTextFormat(Strict, frozen=True, tag_field="type", tag="text"):
    """Anything."""


class JsonTextFormat(Strict, frozen=True, tag_field="type", tag="json_object"):
    """Ask for any JSON object."""


class SchemaTextFormat(Strict, frozen=True, tag_field="type", tag="json_schema"):
    """JSON of this schema."""

    name: SchemaName
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None  # the schema is always kept to


class TextConfig(Strict, frozen=True):
    format: PlainTextFormat | JsonTextFormat | SchemaTextFormat | None = None
    verbosity: Verbosity | None = None  # repeated in the answer; no model here knows it


class ReasoningConfig(Strict, frozen=True):
    effort: ReasoningEffort | None = None
    # repeated in the answer and not used: thoughts are shown whole
    summary: SummaryKind | None = None
    generate_summary: SummaryKind | None = None  # the name before `summary`
    # supported for their default only
    context: str | None = None
    mode: str | None = None


class FunctionTool(Strict, frozen=True, tag_field="type", tag="function"):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema
    strict: bool | None = None
    # supported for their default only
    is_async: bool | None = msgspec.field(name="async", default=None)
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    output_schema: dict[str, Any] | None = None


class NamespaceTool(Strict, frozen=True, tag_field="type", tag="namespace"):
    """Functions under a common name."""

    name: FunctionName
    description: str
    tools: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_TOOLS)]


class FunctionToolChoice(Strict, frozen=True, tag_field="type", tag="function"):
    name: FunctionName


class AllowedTool(Strict, frozen=True):
    type: Literal["function"]
    name: FunctionName


class AllowedTools(Strict, frozen=True, tag_field="type", tag="allowed_tools"):
    """Allow calls of these functions only."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ResponsesRequest(RequestBase, frozen=True, kw_only=True):
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_INPUT_ITEMS)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    include: list[Included] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Metadata | None = None
    # accepted and not used: nothing is stored, no tool runs here, prefixes are cached without being told
    store: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=0, le=MAX_U32)] | None = None
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    service_tier: ServiceTier | None = None
    client_metadata: dict[str, Any] | None = None  # what Codex reports about itself
    # where responses are stored
    background: bool | None = None
    previous_response_id: str | None = None
    # supported for their default only
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    context_management: list[Any] | None = None
    access_programs: Any = None
    image: Any = None


# --- input items --------------------------------------------------------------------------------------


class ContentPart(Lenient, frozen=True):
    type: TextPartType
    text: str | None = None
    # of parts that are known and not supported
    refusal: Any = None
    image_url: Any = None
    file_id: Any = None
    detail: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    input_audio: Any = None


class MessageItem(Lenient, frozen=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]
    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None


class FunctionCallItem(Lenient, frozen=True):
    call_id: str
    name: str
    arguments: str
    type: Literal["function_call"]
    namespace: str | None = None
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(Lenient, frozen=True):
    call_id: str
    output: str | list[ContentPart]
    type: Literal["function_call_output"]
    id: str | None = None
    status: str | None = None


class ThoughtPart(Lenient, frozen=True):
    type: str
    text: str


class ReasoningItem(Lenient, frozen=True):
    type: Literal["reasoning"]
    summary: list[ThoughtPart] | None = None
    content: list[ThoughtPart] | None = None
    id: str | None = None
    status: str | None = None
    encrypted_content: str | None = None  # nobody here can read it


class ItemReference(Lenient, frozen=True):
    """Stands for an item of a stored response."""

    id: str
    type: Literal["item_reference"] | None = None


InputItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


# --- the answer ---------------------------------------------------------------------------------------


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    logprobs: list[ChatLogprob]
    annotations: list[Any] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: str = "assistant"


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[Any] = []


class OutputCall(Struct, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0  # which are billed apart; here nothing is


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0  # thoughts are told from prose by their text, so their tokens are not counted apart


class ResponseUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class IncompleteDetails(Struct, frozen=True):
    reason: str


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class ShownSchemaFormat(Struct, frozen=True, tag_field="type", tag="json_schema"):
    name: str
    schema: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]  # encoded once: it may be large
    description: str | None
    strict: bool | None


class TextSettings(Struct, frozen=True):
    format: PlainTextFormat | JsonTextFormat | ShownSchemaFormat = PlainTextFormat()
    verbosity: str = "medium"


class ReasoningSettings(Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class ShownTool(Struct, frozen=True, tag_field="type", tag="function"):
    name: str
    description: str | None
    parameters: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": ["object", "null"]})]  # encoded once, too
    strict: bool | None


class ShownNamespace(Struct, frozen=True, tag_field="type", tag="namespace"):
    name: str
    description: str
    tools: list[ShownTool]


class Settings(Struct, frozen=True, kw_only=True):
    """The settings of a request, as its answer repeats them."""

    background: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningSettings = ReasoningSettings()
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = False
    temperature: float = 1.0
    text: TextSettings = TextSettings()
    tool_choice: str | FunctionToolChoice | AllowedTools = "auto"
    tools: list[ShownTool | ShownNamespace] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    user: str | None = None


class Response(Settings, frozen=True, kw_only=True):
    id: str
    object: str = "response"
    created_at: int  # unix seconds
    completed_at: int | None = None
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    kvmesh: TraceReport | UnsetType = UNSET


class DeletedResponse(Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


class KeptMessage(Struct, frozen=True, tag_field="type", tag="message"):
    """An input message as the list of input items shows it."""

    id: str
    role: str
    content: list["OutputText | KeptText"]
    status: str = "completed"


class KeptText(Struct, frozen=True, tag_field="type", tag="input_text"):
    text: str


class KeptOutput(Struct, frozen=True, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: str | list[OutputText | KeptText]
    status: str = "completed"


class KeptReasoning(Struct, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    content: list[ReasoningText]
    summary: list["SummaryText"]
    encrypted_content: str | UnsetType = UNSET
    status: str = "completed"


class SummaryText(Struct, frozen=True, tag_field="type", tag="summary_text"):
    text: str


KeptItem = KeptMessage | OutputCall | KeptOutput | KeptReasoning


class ItemList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[KeptItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Struct, frozen=True, tag_field="object", tag="response.input_tokens"):
    """The length of a prompt."""

    input_tokens: int


# --- the events of a stream ---------------------------------------------------------------------------


class StreamEvent(Struct, kw_only=True, tag_field="type"):
    sequence_number: int = 0  # given when it is sent


class ResponseCreated(StreamEvent, tag="response.created"):
    response: Response


class ResponseQueued(StreamEvent, tag="response.queued"):
    response: Response


class ResponseInProgress(StreamEvent, tag="response.in_progress"):
    response: Response


class ResponseCompleted(StreamEvent, tag="response.completed"):
    response: Response


class ResponseIncomplete(StreamEvent, tag="response.incomplete"):
    response: Response


class ResponseFailed(StreamEvent, tag="response.failed"):
    response: Response


class ErrorEvent(StreamEvent, kw_only=True, tag="error"):
    code: str | None
    message: str
    param: str | None


class ItemAdded(StreamEvent, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(StreamEvent, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ItemEvent(StreamEvent, kw_only=True):
    item_id: str
    output_index: int


class PartEvent(ItemEvent, kw_only=True):
    content_index: int = 0  # of the item's only part


class PartAdded(PartEvent, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(PartEvent, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(PartEvent, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatLogprob]


class TextDone(PartEvent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatLogprob]


class ReasoningDelta(PartEvent, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(PartEvent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(ItemEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(ItemEvent, kw_only=True, tag="response.function_call_arguments.done"):
    arguments: str


Event = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ErrorEvent
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)
