"""OpenAI's wire shapes for chat and text completions: what comes in, what goes out.

Fields that are known but not supported are here as well, so that they can be refused by name
(`bodies.refuse_unsupported`). A field that is not here is unknown: the decoder refuses the field in a parameter, and
ignores the field in a message or a tool.
"""

from typing import Annotated, Any, Generic, Literal, TypeVar

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
    TokenId,
    TopP,
    TraceReport,
)

MAX_CHOICES = 128  # answers of one request
MAX_BIASES = 1024
MAX_ALLOWED_TOKENS = 4096
MAX_METADATA = 16
ROLES = ("assistant", "developer", "system", "tool", "user")

Temperature = Annotated[float, Meta(ge=0, le=2)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
FunctionName = Annotated[str, Meta(min_length=1, max_length=96)]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
Verbosity = Literal["low", "medium", "high"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA)]
SchemaName = Annotated[str, Meta(min_length=1, max_length=64)]
# described by all they may be, and checked where an error can say more than the decoder's
RoleName = Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
TextPartType = Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]


class StreamOptions(Strict, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage: in every chunk, as far as it has come
    include_obfuscation: bool | None = None  # ignored: chunks are never padded here


class JsonSchema(Strict, frozen=True):
    name: SchemaName
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None  # the schema is always kept to; a string format that is not known counts if true


class TextFormat(Strict, frozen=True, tag_field="type", tag="text"):
    """Anything."""


class JsonObjectFormat(Strict, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(Strict, frozen=True, tag_field="type", tag="json_schema"):
    """JSON of this schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class RequestBase(Strict, frozen=True):
    """Holds what chat and text completions have in common."""

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_U32)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_U32)] | None = None  # -1 and 0: all
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Salt | None = None
    kvmesh: KvmeshOptions | None = None
    user: Annotated[str, Meta(max_length=MAX_USER_CHARS)] | None = None  # names the session
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)] | None = None  # by token id
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    response_format: ResponseFormat | None = None


class TextPart(Lenient, frozen=True):
    type: TextPartType
    text: str | None = None
    # of parts that are known and not supported
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None
    video_url: Any = None


class FunctionCall(Lenient, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Lenient, frozen=True):
    """A call that an assistant made in an earlier turn."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(Lenient, frozen=True):
    role: RoleName
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same thoughts, by the name that vLLM gives them
    refusal: str | None = None
    # known and not supported
    audio: Any = None
    function_call: Any = None


class FunctionSpec(Lenient, frozen=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema
    strict: bool | None = None  # forced calls always keep to the schema; an unknown string format counts if true


class ToolSpec(Lenient, frozen=True):
    function: FunctionSpec
    type: Literal["function"] = "function"


class FunctionChoice(Strict, frozen=True):
    name: FunctionName


class AllowedToolsChoice(Strict, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolSpec], Meta(min_length=1, max_length=MAX_TOOLS)]  # their names count


class NamedToolChoice(Strict, frozen=True):
    """A choice that names a function, or with the type `allowed_tools` those that may be called."""

    type: Literal["function", "allowed_tools"] = "function"
    function: FunctionChoice | None = None
    allowed_tools: AllowedToolsChoice | None = None


class ChatRequest(RequestBase, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # accepted and not used: nothing is stored, nothing is billed, prefixes are cached without being told
    metadata: Metadata | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    prediction: dict[str, Any] | None = None
    service_tier: ServiceTier | None = None
    verbosity: Verbosity | None = None
    parallel_tool_calls: bool | None = None
    tools: Annotated[list[ToolSpec], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    # names that a chat template may read; reasoning_effort is one of them
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # supported for their default only
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None


class CompletionRequest(RequestBase, frozen=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_U32)] | None = None  # 0: with echo only
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None


# --- answers ------------------------------------------------------------------------------------------

ChoiceT = TypeVar("ChoiceT")


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int = 0


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """Lists of equal length, one entry per token. `text_offset`: characters before it in the text.

    With `echo` the tokens of the prompt come first. The first of them has no logprob.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AnswerFunction(Struct, frozen=True):
    name: str
    arguments: str


class AnswerToolCall(Struct, frozen=True):
    id: str
    function: AnswerFunction
    type: str = "function"


class AnswerMessage(Struct, frozen=True, kw_only=True):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    annotations: list[Any] = []  # of searches in the web, which there are none of
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int = 0
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str


class Response(Struct, Generic[ChoiceT], frozen=True, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    usage: Usage
    kvmesh: TraceReport | UnsetType = UNSET


# --- streams, as `chunks.ChunkWriter` writes them -------------------------------------------------------


class DeltaFunction(Struct, frozen=True):
    name: str | UnsetType = UNSET  # where the call begins
    arguments: str = ""


class DeltaToolCall(Struct, frozen=True, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: DeltaFunction


class ChatDelta(Struct, frozen=True):
    """Carry what a chunk adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class CompletionChunkChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Chunk(Struct, Generic[ChoiceT], frozen=True, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    usage: Usage | UnsetType | None = UNSET
    kvmesh: TraceReport | UnsetType = UNSET


# --- models -------------------------------------------------------------------------------------------


class ModelObject(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "kvmesh"
    parent: str | None = None  # of an adapter: the model it belongs to
    max_model_len: int  # tokens of prompt and answer together; the field's name for it
    block_size: int


class ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelObject]


# --- errors -------------------------------------------------------------------------------------------


class ErrorContent(Struct, frozen=True):
    """OpenAI's."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    error: ErrorContent
