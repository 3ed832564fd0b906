"""Read and check a request of the Responses API: JSON in, a `ResponsesCall` or an error that names the parameter out.

`store: true` is OpenAI's default and is accepted; still nothing is kept, as the answer's `store: false` says. Clients
send the whole conversation each time, our own output items among it, thoughts in plain text. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import msgspec

from frontend.call import Call, Endpoint, Tools
from frontend.openai import (
    FunctionChoice,
    FunctionSpec,
    NamedToolChoice,
    ToolSpec,
    encode,
)
from frontend.parameters import (
    TOOL_NAME,
    arguments_of,
    common_fields,
    decode_body,
    guide_of,
    sampling_params,
    schema_guide,
    template_options,
    tools_of,
    validation_error,
)
from frontend.responses.shapes import (
    LOGPROBS,
    AllowedTools,
    ContentPart,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    FunctionToolChoice,
    JsonTextFormat,
    MessageItem,
    PlainTextFormat,
    ReasoningConfig,
    ReasoningItem,
    ReasoningSettings,
    ResponsesRequest,
    SchemaTextFormat,
    Settings,
    ShownSchemaFormat,
    ShownTool,
    TextConfig,
    TextSettings,
    ThoughtPart,
)
from frontend.templates import ChatMessage
from protocol.errors import InvalidRequestError
from protocol.messages import Guide, GuideKind

TEXT_PARTS = frozenset({"input_text", "output_text"})
INCLUDABLE = frozenset({LOGPROBS, "reasoning.encrypted_content"})  # the latter: thoughts are there, in plain text

_decoder = msgspec.json.Decoder(ResponsesRequest)
ShapeT = TypeVar("ShapeT")
Choice = str | FunctionToolChoice | AllowedTools


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesCall(Call):
    settings: Settings  # as the answer repeats them


def parse_responses(body: bytes) -> ResponsesCall:
    """Raises InvalidRequestError."""
    request = decode_body(body, _decoder)
    _refuse_unsupported(request)
    _check(request)
    specs = [_function_tool(tool, n) for n, tool in enumerate(request.tools or ())]
    choice = _choice(request.tool_choice)
    tools = _tools(specs, choice, parallel=request.parallel_tool_calls is not False)
    return ResponsesCall(
        endpoint=Endpoint.RESPONSES,
        messages=_messages(request),
        sampling=sampling_params(request, _top_logprobs(request)),
        max_tokens=request.max_output_tokens,
        guide=_guide(request.text, tools),
        tools=tools,
        template_options=template_options(request.chat_template_kwargs, _effort(request.reasoning)),
        settings=_settings(request, specs, choice),
        **common_fields(request),
    )


def _refuse(param: str, reason: str) -> NoReturn:
    raise InvalidRequestError(f"Invalid value for '{param}': {reason}", param=param)


def _not_supported(param: str, hint: str) -> NoReturn:
    raise InvalidRequestError(f"The parameter '{param}' is not supported", hint=hint, param=param)


# --- parameters that are known and not supported ------------------------------------------------------

_STATELESS = "nothing is stored here; send the whole conversation as input"
_DEFAULTS = "its default is accepted, or leave it out"
_HARMLESS: dict[str, tuple[Sequence[object], str]] = {  # values, and what to do instead of sending others
    "previous_response_id": ((), _STATELESS),
    "conversation": ((), _STATELESS),
    "prompt": ((), "no prompt templates are stored here; send instructions and input"),
    "background": ((False,), "send stream, and stay connected"),
    "truncation": (("disabled",), "input is never cut here; leave old items out yourself"),
    "service_tier": (("auto", "default"), _DEFAULTS),
    "moderation": ((), "leave it out"),
    "context_management": (([],), "leave it out"),
    "access_programs": ((), "leave it out"),
    "image": ((), "leave it out"),
    "max_tokens": ((), "send max_output_tokens"),
    "response_format": ((), "send text.format"),
    "n": ((1,), _DEFAULTS),
}
_HARMLESS_PARTS: dict[str, dict[str, Sequence[object]]] = {
    "text": {"verbosity": ("medium",)},
    "reasoning": {
        "summary": ("auto",),  # there are none: thoughts are shown whole
        "generate_summary": ("auto",),
        "context": ("auto",),
        "mode": ("standard",),
    },
}


def _refuse_unsupported(request: ResponsesRequest) -> None:
    for name, (harmless, hint) in _HARMLESS.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            _not_supported(name, hint)
    for name, parts in _HARMLESS_PARTS.items():
        _refuse_parts(getattr(request, name), name, parts)


_ATTRIBUTES = {"async": "is_async"}  # where a field's name is none in Python


def _refuse_parts(given: object, where: str, parts: dict[str, Sequence[object]]) -> None:
    for name, harmless in parts.items():
        value = getattr(given, _ATTRIBUTES.get(name, name), None)
        if value is not None and value not in harmless:
            _not_supported(f"{where}.{name}", _DEFAULTS)


def _check(request: ResponsesRequest) -> None:
    for n, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            _refuse(f"include[{n}]", f"{name[:64]!r} is not there to be included; there are: {', '.join(INCLUDABLE)}")
    min_tokens, max_tokens = request.min_tokens or 0, request.max_output_tokens
    if max_tokens is not None and min_tokens > max_tokens:
        _refuse("min_tokens", f"{min_tokens} is more than max_output_tokens, {max_tokens}")
    if request.stream_options is not None and not request.stream:
        _refuse("stream_options", "only allowed when stream is true")


# --- single parameters --------------------------------------------------------------------------------


def _top_logprobs(request: ResponsesRequest) -> int | None:
    if LOGPROBS in (request.include or ()):
        return request.top_logprobs or 0
    if request.top_logprobs:
        _refuse("top_logprobs", f"only allowed when include has {LOGPROBS!r}")
    return None


def _effort(reasoning: ReasoningConfig | None) -> str | None:
    return None if reasoning is None else reasoning.effort


def _guide(text: TextConfig | None, tools: Tools | None) -> Guide | None:
    wanted = text.format if text is not None else None
    if wanted is None or isinstance(wanted, PlainTextFormat):
        return guide_of(None, tools)
    if tools is not None and not tools.is_free:
        _refuse("text.format", "a call that is forced by tool_choice has a format of its own; send one of them")
    if isinstance(wanted, JsonTextFormat):
        return Guide(kind=GuideKind.JSON)
    return schema_guide(wanted.schema, "text.format.schema")


def _settings(request: ResponsesRequest, specs: Sequence[FunctionTool], choice: Choice | None) -> Settings:
    return Settings(
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=ReasoningSettings(effort=_effort(request.reasoning)),
        safety_identifier=request.safety_identifier,
        temperature=1.0 if request.temperature is None else request.temperature,
        text=TextSettings(_shown_format(request.text)),
        tool_choice=choice or "auto",
        tools=[_shown_tool(spec) for spec in specs],
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        user=request.user,
    )


def _shown_format(text: TextConfig | None) -> PlainTextFormat | JsonTextFormat | ShownSchemaFormat:
    match text.format if text is not None else None:
        case JsonTextFormat() as wanted:
            return wanted
        case SchemaTextFormat(name=name, schema=schema, description=description, strict=strict):
            return ShownSchemaFormat(name, _encoded(schema), description, strict)
    return PlainTextFormat()


def _shown_tool(spec: FunctionTool) -> ShownTool:
    parameters = _encoded(spec.parameters)
    return ShownTool(spec.name, spec.description, parameters, spec.strict)


def _encoded(value: dict[str, Any] | None) -> msgspec.Raw:
    """Here, where no more calls are on the stack than were for reading it: later, it might be nested too deeply."""
    return msgspec.Raw(encode(value))


# --- tools --------------------------------------------------------------------------------------------

_HARMLESS_OF_TOOLS: dict[str, Sequence[object]] = {
    "async": (False,),
    "defer_loading": (False,),
    "allowed_callers": ([], ["direct"]),
    "output_schema": (),
}


def _function_tool(tool: dict[str, Any], index: int) -> FunctionTool:
    where = f"tools[{index}]"
    if (kind := tool.get("type")) != "function":
        _refuse(f"{where}.type", f"{_shown(kind)} is not supported; only functions are, which the client runs")
    spec = _read(tool, FunctionTool, where)
    if not TOOL_NAME.fullmatch(spec.name):
        _refuse(f"{where}.name", "use letters, digits, and . _ : / -")
    _refuse_parts(spec, where, _HARMLESS_OF_TOOLS)
    return spec


def _choice(choice: str | dict[str, Any] | None) -> Choice | None:
    if choice is None or isinstance(choice, str):
        return choice
    match choice.get("type"):
        case "function":
            return _read(choice, FunctionToolChoice, "tool_choice")
        case "allowed_tools":
            return _read(choice, AllowedTools, "tool_choice")
        case kind:
            _refuse("tool_choice.type", f"{_shown(kind)} is not supported; send 'function' or 'allowed_tools'")


def _tools(specs: Sequence[FunctionTool], choice: Choice | None, *, parallel: bool) -> Tools | None:
    """None if the model is to know of no tool."""
    if not specs:
        if choice not in (None, "none", "auto"):
            _refuse("tool_choice", "there are no tools to choose from; send tools")
        return None
    if choice == "none":
        return None
    if isinstance(choice, AllowedTools):
        specs, choice = _allowed(specs, choice), choice.mode
    named = NamedToolChoice(FunctionChoice(choice.name)) if isinstance(choice, FunctionToolChoice) else choice
    return tools_of([_chat_tool(spec) for spec in specs], named, parallel=parallel)


def _allowed(specs: Sequence[FunctionTool], choice: AllowedTools) -> list[FunctionTool]:
    """The model is told of these only: it calls what it likes among what it knows."""
    known = {spec.name for spec in specs}
    names = {tool.name for tool in choice.tools}
    for n, tool in enumerate(choice.tools):
        if tool.name not in known:
            _refuse(f"tool_choice.tools[{n}]", f"{tool.name!r} is none of the tools")
    return [spec for spec in specs if spec.name in names]


def _chat_tool(spec: FunctionTool) -> ToolSpec:
    """The tool in the chat's spelling."""
    return ToolSpec(FunctionSpec(name=spec.name, description=spec.description, parameters=spec.parameters))


# --- the conversation ---------------------------------------------------------------------------------


def _messages(request: ResponsesRequest) -> list[ChatMessage]:
    if isinstance(request.input, str):
        messages: list[dict[str, Any]] = [{"role": "user", "content": request.input}]
    else:
        conversation = Conversation()
        for n, item in enumerate(request.input):
            conversation.add(item, f"input[{n}]")
        messages = conversation.messages
        if not messages:
            _refuse("input", "it holds no message; send one for the model to answer")
    return list(_with_instructions(request.instructions, messages))


def _with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Instructions and the system messages that open the input become one: templates know of one at most."""
    if not instructions:
        return messages
    size = next((n for n, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    texts = [instructions, *[str(message["content"]) for message in messages[:size]]]
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[size:]]


SYSTEM_ROLES = frozenset({"system", "developer"})


class Conversation:
    """Input items as messages for chat templates. What an assistant thought and called is part of its message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._thoughts = ""  # that belong to the next item
        self._called: dict[str, str] = {}  # names of functions, by the id of the call

    def add(self, item: dict[str, Any], where: str) -> None:
        """Raises InvalidRequestError."""
        match item.get("type") or ("message" if "role" in item else None):
            case "message":
                self._add_message(_read(item, MessageItem, where), where)
            case "function_call":
                self._add_call(_read(item, FunctionCallItem, where), where)
            case "function_call_output":
                self._add_output(_read(item, FunctionOutputItem, where), where)
            case "reasoning":
                self._thoughts = _joined(self._thoughts, _thoughts(_read(item, ReasoningItem, where)))
            case "item_reference" | None:
                _refuse(f"{where}.type", "it refers to a stored item, and nothing is stored here; send the item itself")
            case kind:
                known = "message, function_call, function_call_output, reasoning"
                _refuse(f"{where}.type", f"{_shown(kind)} is not supported; there are: {known}")

    def _add_message(self, item: MessageItem, where: str) -> None:
        message: dict[str, Any] = {"role": item.role, "content": _text(item.content, f"{where}.content")}
        if item.role == "assistant" and self._thoughts:
            message["reasoning_content"] = self._thoughts
        self._append(message)

    def _add_call(self, item: FunctionCallItem, where: str) -> None:
        function = {"name": item.name, "arguments": arguments_of(item.arguments, f"{where}.arguments")}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._called[item.call_id] = item.name
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        message = self.messages[-1]
        message.setdefault("tool_calls", []).append(call)
        if self._thoughts:
            message["reasoning_content"] = _joined(message.get("reasoning_content", ""), self._thoughts)
            self._thoughts = ""

    def _add_output(self, item: FunctionOutputItem, where: str) -> None:
        if (name := self._called.get(item.call_id)) is None:
            _refuse(f"{where}.call_id", f"{item.call_id[:64]!r} is none of the calls before it; send the call as well")
        content = _text(item.output, f"{where}.output")
        self._append({"role": "tool", "content": content, "tool_call_id": item.call_id, "name": name})

    def _append(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._thoughts = ""  # of an answer that was not sent along


def _joined(*texts: str) -> str:
    return "\n".join([text for text in texts if text])


def _thoughts(item: ReasoningItem) -> str:
    """As they were thought, else their summary; encrypted ones are none."""
    parts: Sequence[ThoughtPart] = item.content or item.summary or ()
    return "\n".join([part.text for part in parts])


def _text(content: str | list[ContentPart], where: str) -> str:
    """Parts are joined by line breaks, as in chats."""
    if isinstance(content, str):
        return content
    return "\n".join([_part(part, f"{where}[{n}]") for n, part in enumerate(content)])


def _part(part: ContentPart, where: str) -> str:
    if part.type not in TEXT_PARTS:
        _refuse(f"{where}.type", f"{part.type[:64]!r} is not supported; send input_text or output_text")
    if part.text is None:
        _refuse(f"{where}.text", "a text part needs it")
    return part.text


# --- objects of several kinds -------------------------------------------------------------------------


def _read(value: dict[str, Any], shape: type[ShapeT], where: str) -> ShapeT:
    """`value`, which stands at `where` in the body, as `shape`. Raises InvalidRequestError."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        reason, at, path = str(error).rpartition(" - at `")
        if not at:
            reason, path = str(error), "$`"
        raise validation_error(f"{reason} - at `{path.replace('$', f'$.{where}', 1)}") from error


def _shown(kind: object) -> str:
    return repr(kind)[:64]
