"""Read and check a request of the Responses API: JSON in, a `ParsedResponses` or an error that names the parameter out.

Where nothing is stored, `store: true` is accepted all the same, because it is OpenAI's default: the answer's
`store: false` says that nothing was kept. Clients send our own output items back, thoughts in plain text. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from kvmesh.frontend.arguments import arguments_of
from kvmesh.frontend.bodies import Only, decode_body, only, refuse, refuse_unsupported, validation_error
from kvmesh.frontend.openai.parameters import check_lengths, common_fields, sampling_params
from kvmesh.frontend.parameters import (
    DeclaredTool,
    ToolWish,
    check_tool_name,
    guide_of,
    or_default,
    schema_guide,
    template_options,
    tools_of,
)
from kvmesh.frontend.request import ParamNames, ParsedRequest, ToolChoice, Tools
from kvmesh.frontend.responses.namespaces import FullName, ToolGroup, flat, full_names, written_name
from kvmesh.frontend.responses.shapes import (
    INCLUDABLE,
    LOGPROBS,
    TEXT_PARTS,
    AllowedTools,
    ContentPart,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    FunctionToolChoice,
    InputItem,
    ItemReference,
    JsonTextFormat,
    MessageItem,
    NamespaceTool,
    PlainTextFormat,
    ReasoningConfig,
    ReasoningItem,
    ReasoningSettings,
    ResponsesRequest,
    SchemaTextFormat,
    Settings,
    ShownNamespace,
    ShownSchemaFormat,
    ShownTool,
    TextConfig,
    TextSettings,
    ThoughtPart,
)
from kvmesh.frontend.shapes import encode
from kvmesh.frontend.template_probes import ChatMessage
from kvmesh.mesh.http.errors import NotFoundError
from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.messages import Guide, GuideKind

NAMES = ParamNames("input", "text.format", "text.format.schema", tool_schema="tools")
_decoder = msgspec.json.Decoder(ResponsesRequest)
ShapeT = TypeVar("ShapeT")
ItemT = TypeVar("ItemT", MessageItem, FunctionCallItem, FunctionOutputItem, ReasoningItem)
Choice = str | FunctionToolChoice | AllowedTools


class ParsedResponses(ParsedRequest, frozen=True, kw_only=True):
    settings: Settings  # as the answer repeats them
    full_names: Mapping[str, FullName]  # of functions in namespaces, by the names that the model writes
    items: Sequence[InputItem] = ()  # of the input, where responses are stored


class Storage(Struct, frozen=True):
    """Says what a request finds where responses are stored."""

    earlier: Sequence[tuple[str, Sequence[dict[str, Any]]]] = ()  # items of the conversation so far, by response
    referenced: Mapping[str, dict[str, Any]] = {}  # stored items that the input refers to, by id
    failure: MeshError | None = None  # why the request cannot have what it wants of the store


def parse_responses(body: bytes, storage: Storage | None = None) -> ParsedResponses:
    """Read a body; `storage` is None where nothing is stored.

    Raise InvalidRequestError, or the failure of `storage`.
    """
    request = decode_body(body, _decoder)
    _refuse_unsupported(request, storage)
    _check(request)
    groups = _tool_groups(request.tools or ())
    specs = flat(groups)
    choice = _choice(request.tool_choice)
    tools = _tools(specs, choice, parallel=request.parallel_tool_calls is not False)
    conversation = _conversation(request, storage)
    return ParsedResponses(
        names=NAMES,
        messages=_with_instructions(request.instructions, conversation.messages),
        sampling=sampling_params(request, _top_logprobs(request)),
        max_tokens=request.max_output_tokens,
        guide=guide_of(_format(request.text), tools, NAMES.format),
        tools=tools,
        template_options=template_options(request.chat_template_kwargs, _effort(request.reasoning)),
        settings=_settings(request, groups, choice, storage),
        full_names=full_names(groups),
        items=conversation.items if storage is not None else (),
        **common_fields(request),
    )


# --- parameters that are known and not supported ------------------------------------------------------

_STATELESS = "nothing is stored here; send the whole conversation as input"
STORED: Mapping[str, Only] = {  # supported where responses are stored
    "previous_response_id": only(hint=_STATELESS),
    "background": only(False, hint="send stream, and stay connected"),
}
DEFAULTS: Mapping[str, Only] = {
    "conversation": only(hint="send previous_response_id, or the whole conversation as input"),
    "prompt": only(hint="no prompt templates are stored here; send instructions and input"),
    "truncation": only("disabled", hint="input is never cut here; leave old items out yourself"),
    "moderation": only(hint="leave it out"),
    "context_management": only([], hint="leave it out"),
    "access_programs": only(hint="leave it out"),
    "image": only(hint="leave it out"),
    "max_tokens": only(hint="send max_output_tokens"),
    "response_format": only(hint="send text.format"),
    "n": only(1),
}
REASONING_DEFAULTS: Mapping[str, Only] = {
    "context": only("auto"),
    "mode": only("standard"),
}
TOOL_DEFAULTS: Mapping[str, Only] = {
    "is_async": only(False, json_name="async"),
    "defer_loading": only(False),
    "allowed_callers": only([], ["direct"]),
    "output_schema": only(),
}
_FILES = ("refusal", "image_url", "file_id", "detail", "file_data", "file_url", "filename", "input_audio")
PART_DEFAULTS: Mapping[str, Only] = {name: only(hint="send text") for name in _FILES}


def _refuse_unsupported(request: ResponsesRequest, storage: Storage | None) -> None:
    refuse_unsupported(request, DEFAULTS)
    if storage is None:
        refuse_unsupported(request, STORED)
    elif request.background and request.store is False:
        refuse("background", "only stored responses can run in the background; leave store out, or send true")
    elif storage.failure is not None:
        raise storage.failure
    if request.reasoning is not None:
        refuse_unsupported(request.reasoning, REASONING_DEFAULTS, "reasoning.")


def _check(request: ResponsesRequest) -> None:
    for n, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            refuse(f"include[{n}]", f"{name[:64]!r} is not there to be included; there are: {', '.join(INCLUDABLE)}")
    check_lengths(request, request.max_output_tokens, "max_output_tokens")


# --- single parameters --------------------------------------------------------------------------------


def _top_logprobs(request: ResponsesRequest) -> int | None:
    if LOGPROBS in (request.include or ()):
        return request.top_logprobs or 0
    if request.top_logprobs:
        refuse("top_logprobs", f"only allowed when include has {LOGPROBS!r}")
    return None


def _effort(reasoning: ReasoningConfig | None) -> str | None:
    return None if reasoning is None else reasoning.effort


def _format(text: TextConfig | None) -> Guide | None:
    match text.format if text is not None else None:
        case JsonTextFormat():
            return Guide(kind=GuideKind.JSON)
        case SchemaTextFormat(schema=schema, strict=strict):
            return schema_guide(schema, "text.format.schema", strict=strict)
    return None


def _settings(
    request: ResponsesRequest, groups: Sequence[ToolGroup], choice: Choice | None, storage: Storage | None
) -> Settings:
    return Settings(
        background=bool(request.background),
        previous_response_id=request.previous_response_id,
        store=storage is not None and request.store is not False,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=_shown_reasoning(request.reasoning),
        safety_identifier=request.safety_identifier,
        temperature=or_default(request.temperature, 1.0),
        text=TextSettings(_shown_format(request.text), _verbosity(request.text)),
        tool_choice=choice or "auto",
        tools=[_shown_group(group) for group in groups],
        top_logprobs=request.top_logprobs or 0,
        top_p=or_default(request.top_p, 1.0),
        user=request.user,
    )


def _shown_reasoning(reasoning: ReasoningConfig | None) -> ReasoningSettings:
    if reasoning is None:
        return ReasoningSettings()
    return ReasoningSettings(reasoning.effort, reasoning.summary or reasoning.generate_summary)


def _verbosity(text: TextConfig | None) -> str:
    return (text.verbosity if text is not None else None) or "medium"


def _shown_format(text: TextConfig | None) -> PlainTextFormat | JsonTextFormat | ShownSchemaFormat:
    match text.format if text is not None else None:
        case JsonTextFormat() as wanted:
            return wanted
        case SchemaTextFormat(name=name, schema=schema, description=description, strict=strict):
            return ShownSchemaFormat(name, _encoded(schema), description, strict)
    return PlainTextFormat()


def _shown_group(group: ToolGroup) -> ShownTool | ShownNamespace:
    shown = [_shown_tool(spec) for spec in group.functions]
    return ShownNamespace(group.namespace, group.description, shown) if group.namespace else shown[0]


def _shown_tool(spec: FunctionTool) -> ShownTool:
    parameters = _encoded(spec.parameters)
    return ShownTool(spec.name, spec.description, parameters, spec.strict)


def _encoded(value: dict[str, Any] | None) -> msgspec.Raw:
    """Here, where no more calls are on the stack than were for reading it: later, it might be nested too deeply."""
    return msgspec.Raw(encode(value))


# --- tools --------------------------------------------------------------------------------------------


SEARCH_OFFLINE: Mapping[str, Any] = {"type": "web_search", "external_web_access": False}
"""A search that may not reach the web finds nothing here, so the model is not offered it. Codex sends it by default."""


def _tool_groups(tools: Sequence[dict[str, Any]]) -> list[ToolGroup]:
    return [_tool_group(tool, f"tools[{n}]") for n, tool in enumerate(tools) if tool != SEARCH_OFFLINE]


def _tool_group(tool: dict[str, Any], where: str) -> ToolGroup:
    if tool.get("type") != "namespace":
        return ToolGroup([_function_tool(tool, where)])
    group = _read(tool, NamespaceTool, where)
    check_tool_name(group.name, f"{where}.name")
    functions = [_function_tool(member, f"{where}.tools[{n}]") for n, member in enumerate(group.tools)]
    return ToolGroup(functions, group.name, group.description)


def _function_tool(tool: dict[str, Any], where: str) -> FunctionTool:
    if (kind := tool.get("type")) != "function":
        refuse(f"{where}.type", f"{_shown(kind)} is not supported; only functions are, which the client runs")
    spec = _read(tool, FunctionTool, where)
    check_tool_name(spec.name, f"{where}.name")
    refuse_unsupported(spec, TOOL_DEFAULTS, f"{where}.")
    return spec


def _choice(choice: str | dict[str, Any] | None) -> Choice | None:
    if choice is None or isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind not in ("function", "allowed_tools"):
        refuse("tool_choice.type", f"{_shown(kind)} is not supported; send 'function' or 'allowed_tools'")
    if kind == "function":
        return _read(choice, FunctionToolChoice, "tool_choice")
    return _read(choice, AllowedTools, "tool_choice")


def _tools(specs: Sequence[FunctionTool], choice: Choice | None, *, parallel: bool) -> Tools | None:
    """Return None if the model is to know of no tool."""
    declared = [DeclaredTool(spec.name, spec.description, spec.parameters, spec.strict) for spec in specs]
    return tools_of(declared, _wish(choice), parallel=parallel)


def _wish(choice: Choice | None) -> ToolWish:
    match choice:
        case FunctionToolChoice(name=name):
            return ToolWish(ToolChoice.NAMED, name)
        case AllowedTools(mode=mode, tools=tools):
            return ToolWish(ToolChoice(mode), "", tuple([tool.name for tool in tools]), "tool_choice.tools")
    return ToolWish(ToolChoice(choice or "auto"))


# --- the conversation ---------------------------------------------------------------------------------


def _conversation(request: ResponsesRequest, storage: Storage | None) -> "Conversation":
    conversation = Conversation(None if storage is None else storage.referenced)
    for response_id, earlier in storage.earlier if storage is not None else ():
        for n, item in enumerate(earlier):
            conversation.add(item, f"{response_id}[{n}]")
    conversation.items.clear()
    if isinstance(request.input, str):
        conversation.say(request.input)
    else:
        for n, item in enumerate(request.input):
            conversation.add(item, f"input[{n}]")
    if not conversation.messages:
        refuse("input", "it holds no message; send one for the model to answer")
    return conversation


def _with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> Sequence[ChatMessage]:
    """Instructions and the system messages that open the input become one: templates know of one at most."""
    if not instructions:
        return messages
    size = next((n for n, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    texts = [instructions, *[str(message["content"]) for message in messages[:size]]]
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[size:]]


SYSTEM_ROLES = frozenset({"system", "developer"})


class Conversation:
    """Input items as messages for chat templates. What an assistant thought and called is part of its message."""

    def __init__(self, stored: Mapping[str, dict[str, Any]] | None = None) -> None:
        """Begin with no message; `stored`: items that others may refer to by id, None where nothing is stored."""
        self._stored = stored
        self.messages: list[dict[str, Any]] = []
        self.items: list[InputItem] = []
        self._thoughts = ""  # that belong to the next item
        self._called: dict[str, str] = {}  # names of functions, by the id of the call

    def say(self, text: str) -> None:
        """Add what the user says."""
        self.items.append(MessageItem(role="user", content=text))
        self._append({"role": "user", "content": text})

    def add(self, item: dict[str, Any], where: str) -> None:
        """Raises InvalidRequestError."""
        match item.get("type") or ("message" if "role" in item else None):
            case "message":
                self._add_message(self._read(item, MessageItem, where), where)
            case "function_call":
                self._add_call(self._read(item, FunctionCallItem, where))
            case "function_call_output":
                self._add_output(self._read(item, FunctionOutputItem, where), where)
            case "reasoning":
                self._thoughts = _joined(self._thoughts, _thoughts(self._read(item, ReasoningItem, where)))
            case kind if kind == "item_reference" or (kind is None and "id" in item):
                self.add(self._referenced(item, where), where)
            case kind:
                known = "message, function_call, function_call_output, reasoning"
                refuse(f"{where}.type", f"{_shown(kind)} is not supported; there are: {known}")

    def _referenced(self, item: dict[str, Any], where: str) -> dict[str, Any]:
        """Return the stored item. Raise InvalidRequestError, NotFoundError."""
        if self._stored is None:
            wanted = f"the item {_shown(item.get('id'))} is only referred to, and nothing is stored here"
            refuse(f"{where}.type", f"{wanted}; send the item itself, or start the frontend with --responses-store")
        wanted_id = _read(item, ItemReference, where).id
        if (found := self._stored.get(wanted_id)) is None:
            missing = f"Item with id {wanted_id[:200]!r} not found. No stored response has it"
            raise NotFoundError(missing, hint="remove it from your input, or send the item itself", param="input")
        return found

    def _read(self, item: dict[str, Any], shape: type[ItemT], where: str) -> ItemT:
        found = _read(item, shape, where)
        self.items.append(found)
        return found

    def _add_message(self, item: MessageItem, where: str) -> None:
        message: dict[str, Any] = {"role": item.role, "content": _text(item.content, f"{where}.content")}
        if item.role == "assistant" and self._thoughts:
            message["reasoning_content"] = self._thoughts
        self._append(message)

    def _add_call(self, item: FunctionCallItem) -> None:
        name = written_name(item.namespace, item.name)
        function = {"name": name, "arguments": arguments_of(item.arguments)}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._called[item.call_id] = name
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        message = self.messages[-1]
        message.setdefault("tool_calls", []).append(call)
        if self._thoughts:
            message["reasoning_content"] = _joined(message.get("reasoning_content", ""), self._thoughts)
            self._thoughts = ""

    def _add_output(self, item: FunctionOutputItem, where: str) -> None:
        if (name := self._called.get(item.call_id)) is None:
            refuse(f"{where}.call_id", f"{item.call_id[:64]!r} is none of the calls before it; send the call as well")
        content = _text(item.output, f"{where}.output")
        self._append({"role": "tool", "content": content, "tool_call_id": item.call_id, "name": name})

    def _append(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._thoughts = ""  # of an answer that was not sent along


def _joined(*texts: str) -> str:
    return "\n".join([text for text in texts if text])


def _thoughts(item: ReasoningItem) -> str:
    """Return the thoughts, else their summary; encrypted ones are none."""
    parts: Sequence[ThoughtPart] = item.content or item.summary or ()
    return "\n".join([part.text for part in parts])


def _text(content: str | list[ContentPart], where: str) -> str:
    """Parts are joined by line breaks, as in chats."""
    if isinstance(content, str):
        return content
    return "\n".join([_part(part, f"{where}[{n}]") for n, part in enumerate(content)])


def _part(part: ContentPart, where: str) -> str:
    if part.type not in TEXT_PARTS:
        refuse(f"{where}.type", f"{part.type[:64]!r} is not supported; send input_text or output_text")
    refuse_unsupported(part, PART_DEFAULTS, f"{where}.")
    if part.text is None:
        refuse(f"{where}.text", "a text part needs it")
    return part.text


# --- objects of several kinds -------------------------------------------------------------------------


def _read(value: dict[str, Any], shape: type[ShapeT], where: str) -> ShapeT:
    """Return `value`, which stands at `where` in the body, as `shape`. Raise InvalidRequestError."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        reason, at, path = str(error).rpartition(" - at `")
        if not at:
            reason, path = str(error), "$`"
        raise validation_error(f"{reason} - at `{path.replace('$', f'$.{where}', 1)}") from error


def _shown(kind: object) -> str:
    return repr(kind)[:64]
