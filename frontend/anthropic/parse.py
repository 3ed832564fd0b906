"""Read and check a request body: JSON in, a `ParsedRequest` or an error that names the parameter out. Pure."""

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import msgspec

from kvmesh.frontend.anthropic.conversation import chat_messages, clear_thoughts, continues, found_tools
from kvmesh.frontend.anthropic.errors import ThreadsUnsupportedError
from kvmesh.frontend.anthropic.shapes import (
    AnyChoice,
    AutoChoice,
    ContextManagement,
    CountRequest,
    LatestTurns,
    MessagesRequest,
    NamedChoice,
    NoChoice,
    ThinkingBetweenTools,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolSpec,
)
from kvmesh.frontend.bodies import Only, decode_body, not_supported, only, refuse, refuse_unsupported
from kvmesh.frontend.parameters import (
    LEAST_TOP_P,
    DeclaredTool,
    ToolWish,
    check_tool_name,
    guide_of,
    hints_of,
    or_default,
    schema_guide,
    tools_of,
)
from kvmesh.frontend.request import ParamNames, ParsedRequest, ToolChoice, Tools
from kvmesh.frontend.template_probes import ChatMessage
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import UNREADABLE, Guide, SamplingParams

NAMES = ParamNames("messages", "output_config.format", "output_config.format.schema", "tools[{}].input_schema")
BY_THE_MODEL = "direct"  # among the callers of a tool
_messages_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)
RequestT = TypeVar("RequestT", bound=CountRequest)


class ParsedMessages(ParsedRequest, frozen=True, kw_only=True):
    omits_thoughts: bool = False  # say that there were thoughts, not which


def parse_messages(body: bytes) -> ParsedMessages:
    """Raises InvalidRequestError."""
    request = _decode(body, _messages_decoder)
    if request.thread is not None:
        _refuse_thread()
    refuse_unsupported(request, MESSAGES_DEFAULTS)
    _check_budget(request)
    return ParsedMessages(
        stream=bool(request.stream),
        sampling=_sampling(request),
        max_tokens=request.max_tokens,
        stops=tuple(request.stop_sequences or ()),
        hints=hints_of(request.kvmesh, _session(request)),
        trace=bool(request.kvmesh and request.kvmesh.trace),
        omits_thoughts=_omits_thoughts(request),
        **_prompt(request),
    )


def parse_count(body: bytes) -> ParsedRequest:
    """The call whose prompt is to be counted. Raises InvalidRequestError."""
    request = _decode(body, _count_decoder)
    return ParsedRequest(**_prompt(request))


def _prompt(request: CountRequest) -> dict[str, Any]:
    """Return what makes the prompt, and what the answer is held to, as fields of ParsedRequest."""
    refuse_unsupported(request, PROMPT_DEFAULTS)
    messages = _edited(chat_messages(request.system, request.messages), request.context_management)
    goes_on = continues(messages)
    tools = _tools(request)
    return {
        "names": NAMES,
        "model": request.model,
        "messages": messages,
        "tools": tools,
        "guide": _guide(request, tools),
        "template_options": _template_options(request),
        "add_generation_prompt": not goes_on,
        "continue_final_message": goes_on,
        "cache_salt": request.cache_salt,
    }


def _edited(messages: list[ChatMessage], management: ContextManagement | None) -> list[ChatMessage]:
    """Return the messages after the edits that the client wants."""
    for edit in (management and management.edits) or ():
        match edit.keep:
            case None:
                messages = clear_thoughts(messages, 1)
            case LatestTurns(value=kept):
                messages = clear_thoughts(messages, kept)
    return messages


# --- JSON ---------------------------------------------------------------------------------------------


class _Typed(msgspec.Struct):
    type: str | None = None


class _Turn(msgspec.Struct):
    content: str | list[_Typed] = ""


class _Edits(msgspec.Struct):
    edits: list[_Typed] | None = None


class _Glance(msgspec.Struct):
    """The part of a body that says what kinds of blocks and tools it holds, and whether it belongs to a thread."""

    messages: list[_Turn] = []
    tools: list[_Typed] | None = None
    thread: _Typed | None = None
    context_management: _Edits | None = None


_glance_decoder = msgspec.json.Decoder(_Glance)
CLEAR_THINKING = "clear_thinking_20251015"
BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


def _decode(body: bytes, decoder: msgspec.json.Decoder[RequestT]) -> RequestT:
    try:
        return decode_body(body, decoder)
    except InvalidRequestError:
        _refuse_foreign(body)  # which says more than that a field of such a block is unknown
        raise


def _refuse_foreign(body: bytes) -> None:
    """Refuse tools that Anthropic runs or defines, and content that is not text."""
    try:
        glance = _glance_decoder.decode(body)
    except UNREADABLE:
        return
    if glance.thread is not None:  # such a body may hold no messages at all
        _refuse_thread()
    for n, tool in enumerate(glance.tools or ()):
        if tool.type not in (None, "custom"):
            what = f"{tool.type[:64]!r} is a tool of Anthropic's"
            not_supported(f"tools[{n}].type", what, "describe the tool with name and input_schema")
    for n, edit in enumerate((glance.context_management and glance.context_management.edits) or ()):
        if edit.type is not None and edit.type != CLEAR_THINKING:
            what = f"there is no {edit.type[:64]!r} here"
            not_supported(f"context_management.edits[{n}].type", what, f"send {CLEAR_THINKING}, or leave it out")
    for n, turn in enumerate(glance.messages):
        for k, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            if block.type is not None and block.type not in BLOCKS:
                what = f"there is no {block.type[:64]!r} here"
                not_supported(f"messages[{n}].content[{k}].type", what, f"send {', '.join(BLOCKS)}")


def _refuse_thread() -> NoReturn:
    raise ThreadsUnsupportedError(
        "The parameter 'thread' is not supported: nothing is stored", hint="send the whole conversation", param="thread"
    )


# --- parameters that are known and not supported ------------------------------------------------------

PROMPT_DEFAULTS: Mapping[str, Only] = {
    "speed": only("standard"),
    "mcp_servers": only([]),
    "billing_policy": only({"type": "billing_policy"}, {"type": "billing_policy", "bill_to": "self"}),
}
MESSAGES_DEFAULTS: Mapping[str, Only] = {
    "service_tier": only("auto", "standard_only"),
    "container": only(),
    "inference_geo": only(),
    "user_profile_id": only(),
    "compaction": only(),
    "fallbacks": only([], "default"),
    "fallback_credit_token": only(),
    "thread": only(),
}


# --- tools and structured output ----------------------------------------------------------------------


def _tools(request: CountRequest) -> Tools | None:
    """Return None if the model is to know of no tool."""
    choice = request.tool_choice
    checked = [(tool, _declared(tool, f"tools[{n}].")) for n, tool in enumerate(request.tools or ())]
    found = found_tools(request.messages) if any(tool.defer_loading for tool, _ in checked) else frozenset[str]()
    declared = [shown for tool, shown in checked if not tool.defer_loading or tool.name in found]
    alone = isinstance(choice, AutoChoice | AnyChoice | NamedChoice) and bool(choice.disable_parallel_tool_use)
    return tools_of(declared, _wish(choice), parallel=not alone)


def _wish(choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None) -> ToolWish:
    match choice:
        case NoChoice():
            return ToolWish(ToolChoice.NONE)
        case AnyChoice():
            return ToolWish(ToolChoice.REQUIRED)
        case NamedChoice():
            return ToolWish(ToolChoice.NAMED, choice.name)
    return ToolWish()


def _declared(tool: ToolSpec, where: str) -> DeclaredTool:
    check_tool_name(tool.name, f"{where}name")
    if tool.allowed_callers and BY_THE_MODEL not in tool.allowed_callers:
        not_supported(f"{where}allowed_callers", "only the model calls tools here", "add 'direct', or leave it out")
    schema = tool.input_schema
    if tool.input_examples:
        schema = {**schema, "examples": tool.input_examples}
    return DeclaredTool(tool.name, tool.description, schema, tool.strict)


def _guide(request: CountRequest, tools: Tools | None) -> Guide | None:
    form = request.output_config.format if request.output_config is not None else None
    if form is not None and request.output_format is not None:
        refuse("output_format", "output_config.format says it already; send one of them")
    form = form or request.output_format
    return guide_of(None if form is None else schema_guide(form.schema), tools, NAMES.format)


# --- thoughts -----------------------------------------------------------------------------------------


def _template_options(request: CountRequest) -> dict[str, Any]:
    """Under the names by which chat templates know them. Without `thinking` the model's own default holds."""
    options: dict[str, Any] = {}
    if request.output_config is not None and request.output_config.effort is not None:
        options["reasoning_effort"] = request.output_config.effort
    match request.thinking:
        case None:
            return options
        case ThinkingBetweenTools():
            not_supported("thinking.type", "'between_tools'", "send enabled, adaptive or disabled")
        case ThinkingEnabled(budget_tokens=budget_tokens):
            options["thinking_budget"] = budget_tokens
    thinks = not isinstance(request.thinking, ThinkingDisabled)
    return options | {"enable_thinking": thinks, "thinking": thinks}


def _check_budget(request: MessagesRequest) -> None:
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= request.max_tokens:
        refuse(
            "thinking.budget_tokens",
            f"{thinking.budget_tokens} is not less than max_tokens, {request.max_tokens}, which thoughts count towards",
        )


def _omits_thoughts(request: MessagesRequest) -> bool:
    return getattr(request.thinking, "display", None) == "omitted"


# --- the rest -----------------------------------------------------------------------------------------


def _sampling(request: MessagesRequest) -> SamplingParams:
    return SamplingParams(
        temperature=or_default(request.temperature, 1.0),
        top_p=max(or_default(request.top_p, 1.0), LEAST_TOP_P),
        top_k=request.top_k or 0,
    )


def _session(request: MessagesRequest) -> str | None:
    return request.metadata.user_id if request.metadata is not None else None
