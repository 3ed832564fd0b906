"""Read and check a request body: JSON in, a `Call` or an error that names the parameter out. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import msgspec

from frontend.call import Call, Endpoint, ToolChoice, Tools
from frontend.generator import Hints
from frontend.openai import (
    MAX_CHOICES,
    MAX_U32,
    ROLES,
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    KvmeshOptions,
    Message,
    NamedToolChoice,
    RequestBase,
    ResponseFormat,
    TextPart,
    ToolSpec,
)
from frontend.parsers.events import Tool
from frontend.parsers.tools import named_schema, required_schema
from frontend.templates import ChatMessage
from protocol.errors import InvalidRequestError
from protocol.messages import Guide, GuideKind, SamplingParams

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions; chats default to what the context leaves
LEAST_TOP_P = 1e-9  # 0 is allowed, and leaves the likeliest token
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
MAX_TOLD_CHARS = 200  # of what a client has sent and an error repeats
MAX_SCHEMA_DEPTH = 96  # Python's recursion ends deeper schemas anywhere on their way
MAX_SCHEMA_BYTES = 1 << 20  # it goes out with each answer of a request
MAX_TOKEN_ID_CHARS = 10
MAX_NESTS = 1 << 20  # lists and objects in a body, each of which takes 60 bytes and more; brackets in text count too


class _MaybeMessages(msgspec.Struct):
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_messages_decoder = msgspec.json.Decoder(_MaybeMessages)
BodyT = TypeVar("BodyT")


def parse_chat(body: bytes) -> Call:
    """Raises InvalidRequestError."""
    request = decode_body(body, _chat_decoder)
    refuse_unsupported(request, CHAT_DEFAULTS)
    tools = _tools(request)
    max_tokens = _chat_max_tokens(request)
    _check(request, max_tokens)
    n = _choices(request.n or 1, 1, request)
    return Call(
        endpoint=Endpoint.CHAT,
        messages=[message_of(message, n) for n, message in enumerate(request.messages)],
        n=n,
        best_of=n,
        sampling=sampling_params(request, _chat_logprobs(request)),
        max_tokens=max_tokens,
        guide=guide_of(request.response_format, tools),
        tools=tools,
        template_options=template_options(request.chat_template_kwargs, request.reasoning_effort),
        add_generation_prompt=request.add_generation_prompt is not False and not request.continue_final_message,
        continue_final_message=_continues(request),
        **common_fields(request),
    )


def parse_completion(body: bytes) -> Call:
    """Raises InvalidRequestError."""
    request = decode_body(body, _completion_decoder)
    max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    _check(request, max_tokens)
    prompts = prompts_of(request.prompt, "prompt", MAX_CHOICES)
    n = request.n or 1
    return Call(
        endpoint=Endpoint.COMPLETIONS,
        prompts=prompts,
        suffix=request.suffix or "",
        echo=_echo(request),
        n=_choices(n, len(prompts), request),
        best_of=_best_of(request, n, len(prompts)),
        sampling=sampling_params(request, request.logprobs),
        max_tokens=max_tokens,
        guide=guide_of(request.response_format, None),
        **common_fields(request),
    )


def parse_either(body: bytes) -> Call:
    """A body of either endpoint: that of a chat has `messages`. Raises InvalidRequestError."""
    is_chat = decode_body(body, _messages_decoder).messages is not msgspec.UNSET
    return parse_chat(body) if is_chat else parse_completion(body)


def _check(request: RequestBase, max_tokens: int | None) -> None:
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        refuse("min_tokens", f"{min_tokens} is more than max_tokens, {max_tokens}")
    if request.stream_options is not None and not request.stream:
        refuse("stream_options", "only allowed when stream is true")


def common_fields(request: RequestBase) -> dict[str, Any]:
    """What the endpoints share, as fields of Call."""
    options = request.stream_options
    include_usage = bool(options and options.include_usage)
    return {
        "model": request.model,
        "stream": bool(request.stream),
        "include_usage": include_usage,
        "is_usage_continuous": include_usage and bool(options and options.continuous_usage_stats),
        "has_seed": request.seed is not None,
        "min_tokens": request.min_tokens or 0,
        "stops": _stops(request.stop),
        "stop_token_ids": tuple(request.stop_token_ids or ()),
        "ignore_eos": bool(request.ignore_eos),
        "cache_salt": request.cache_salt,
        "hints": _hints(request),
        "trace": bool(request.kvmesh and request.kvmesh.trace),
    }


def _choices(n: int, prompts: int, request: RequestBase) -> int:
    if n * prompts > MAX_CHOICES:
        refuse("n", f"{n} answers to {prompts} prompts are more than {MAX_CHOICES}")
    if n > 1 and request.temperature == 0:
        refuse("n", "with temperature 0 all answers are the same; send n 1 or a temperature")
    return n


def _best_of(request: CompletionRequest, n: int, prompts: int) -> int:
    best_of = request.best_of or n
    if best_of < n:
        refuse("best_of", f"{best_of} is less than n, {n}")
    if best_of > n and request.stream:
        refuse("best_of", "an answer can be streamed only if none is left out; send best_of equal to n")
    if best_of > n and request.temperature == 0:
        refuse("best_of", "with temperature 0 all answers are the same")
    if best_of * prompts > MAX_CHOICES:
        refuse("best_of", f"{best_of} answers to {prompts} prompts are more than {MAX_CHOICES}")
    return best_of


def _echo(request: CompletionRequest) -> bool:
    if request.echo and request.logprobs is not None:
        not_supported("echo", hint="logprobs of the prompt are not computed; send one of echo and logprobs")
    return bool(request.echo)


def _hints(request: RequestBase) -> Hints:
    options = request.kvmesh or KvmeshOptions()
    return Hints(
        disaggregate=options.disaggregate,
        pin=options.worker,
        session=request.user or "",
        explain=bool(options.explain),
    )


# --- JSON ---------------------------------------------------------------------------------------------

_MISSING = re.compile(r"^Object missing required field `([^`]*)`")
_UNKNOWN = re.compile(r"^Object contains unknown field `([^`]*)`")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


def decode_body(body: bytes, decoder: msgspec.json.Decoder[BodyT]) -> BodyT:
    """Raises InvalidRequestError."""
    if len(body) > MAX_NESTS and (nests := body.count(b"[") + body.count(b"{")) > MAX_NESTS:
        raise InvalidRequestError(
            f"the request body has {nests} opening brackets and braces, more than {MAX_NESTS}", hint="send less"
        )
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error}") from error


def validation_error(text: str) -> InvalidRequestError:
    """msgspec's words as OpenAI's: the message names the parameter, and so does `param`."""
    found = _PATH.search(text)
    path = shortened(found.group(1)) if found else ""
    reason = text[: found.start()] if found else text
    if missing := _MISSING.match(reason):
        param = _join(path, missing.group(1))
        return InvalidRequestError(f"Missing required parameter: '{param}'", param=param)
    if unknown := _UNKNOWN.match(reason):
        param = _join(path, shortened(unknown.group(1)))
        return InvalidRequestError(f"Unrecognized request argument supplied: {param}", param=param)
    reason = shortened(reason)
    if not path:
        return InvalidRequestError(f"Invalid request body: {reason[:1].lower()}{reason[1:]}")
    return InvalidRequestError(f"Invalid value for '{path}': {reason[:1].lower()}{reason[1:]}", param=path)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def shortened(text: str) -> str:
    """As an error may repeat it: a body may hold megabytes."""
    return text if len(text) <= MAX_TOLD_CHARS else text[:MAX_TOLD_CHARS] + "..."


def refuse(param: str, reason: str) -> NoReturn:
    raise InvalidRequestError(f"Invalid value for '{param}': {reason}", param=param)


def not_supported(param: str, what: str = "", hint: str = "leave it out") -> NoReturn:
    """`what` the parameter is, if its name alone does not say it."""
    reason = f"The parameter '{param}' is not supported" + (f": {what}" if what else "")
    raise InvalidRequestError(reason, hint=hint, param=param)


# --- parameters that are known and not supported ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Only:
    """The values of a parameter that ask for nothing; null is always one of them."""

    values: tuple[object, ...]
    hint: str  # what to do instead of sending another
    json_name: str  # where it is not that of the field


def only(*values: object, hint: str = "its default is accepted, or leave it out", json_name: str = "") -> Only:
    return Only(values, hint, json_name)


CHAT_DEFAULTS: Mapping[str, Only] = {
    "functions": only([], hint="send tools"),
    "function_call": only("none", hint="send tools and tool_choice"),
    "modalities": only([], ["text"]),
    "audio": only(),
    "prediction": only(),
    "service_tier": only("auto", "default"),
    "verbosity": only("medium"),
    "web_search_options": only(),
    "moderation": only(),
}
MESSAGE_DEFAULTS: Mapping[str, Only] = {"audio": only(), "function_call": only(hint="send tool_calls")}
PART_DEFAULTS: Mapping[str, Only] = {
    name: only(hint="send text") for name in ("image_url", "input_audio", "file", "refusal", "video_url")
}


def refuse_unsupported(holder: msgspec.Struct, defaults: Mapping[str, Only], where: str = "") -> None:
    """A parameter that would change the answer is refused by name. `where`: before the name."""
    for name, harmless in defaults.items():
        value = getattr(holder, name)
        if value is not None and value not in harmless.values:
            not_supported(where + (harmless.json_name or name), hint=harmless.hint)


# --- tools and structured output ----------------------------------------------------------------------


def _tools(request: ChatRequest) -> Tools | None:
    """None if the model is to know of no tool."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            refuse("tool_choice", "there are no tools to choose from; send tools")
        return None
    if choice == "none":
        return None
    return tools_of(request.tools, choice, parallel=request.parallel_tool_calls is not False)


def tools_of(specs: Sequence[ToolSpec], choice: str | NamedToolChoice | None, *, parallel: bool) -> Tools:
    """Raises InvalidRequestError."""
    functions = tuple(_function(spec, n) for n, spec in enumerate(specs))
    named = choice.function.name if isinstance(choice, NamedToolChoice) else ""
    if named and named not in {function.name for function in functions}:
        refuse("tool_choice", f"{named!r} is none of the tools")
    kind = ToolChoice.NAMED if named else ToolChoice(choice if isinstance(choice, str) else "auto")
    shown = tuple(_shown_tool(spec) for spec in specs)
    return Tools(functions, shown, kind, named, parallel)


def _function(spec: ToolSpec, index: int) -> Tool:
    if not TOOL_NAME.fullmatch(spec.function.name):
        refuse(f"tools[{index}].function.name", "use letters, digits, and . _ : / -")
    return Tool(spec.function.name, spec.function.parameters or {})


def _shown_tool(spec: ToolSpec) -> dict[str, Any]:
    """As chat templates expect it."""
    function: dict[str, Any] = {"name": spec.function.name}
    if spec.function.description is not None:
        function["description"] = spec.function.description
    function["parameters"] = spec.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def guide_of(response_format: ResponseFormat | None, tools: Tools | None) -> Guide | None:
    """What the answer is held to. Raises InvalidRequestError."""
    guide: Guide | None = None
    match response_format:
        case JsonObjectFormat():
            guide = Guide(kind=GuideKind.JSON)
        case JsonSchemaFormat():
            guide = schema_guide(response_format.json_schema.schema, "response_format.json_schema.schema")
    if tools is None or tools.is_free:
        return guide
    if guide is not None:
        refuse("response_format", "a call that is forced by tool_choice has a format of its own; send one of them")
    if tools.choice is ToolChoice.NAMED:
        [tool] = [tool for tool in tools.functions if tool.name == tools.named][:1]
        return schema_guide(named_schema(tool))
    return schema_guide(required_schema(tools.functions, tools.parallel))


def schema_guide(schema: dict[str, Any], param: str = "tools") -> Guide:
    """`param`: where the schema comes from. Raises InvalidRequestError if it is too deep or too large."""
    if is_deeper(schema, MAX_SCHEMA_DEPTH):
        refuse(param, f"a schema is nested deeper than {MAX_SCHEMA_DEPTH} levels; flatten it, or use $defs")
    text = msgspec.json.encode(schema)
    if len(text) > MAX_SCHEMA_BYTES:
        refuse(param, f"what the answer is held to has {len(text)} bytes of schema, more than {MAX_SCHEMA_BYTES}")
    return Guide(kind=GuideKind.JSON_SCHEMA, value=text.decode())


def is_deeper(value: object, most: int) -> bool:
    """Whether JSON is nested in more than `most` levels."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        inner = [part for item in level for part in (item.values() if isinstance(item, dict) else item)]
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return False
    return bool(level)


# --- chat templates -----------------------------------------------------------------------------------

RESERVED_OPTIONS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def template_options(given: dict[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any]:
    """`given`: under `chat_template_kwargs`. Raises InvalidRequestError."""
    options = dict(given or {})
    if taken := sorted(RESERVED_OPTIONS & options.keys()):
        refuse(f"chat_template_kwargs.{taken[0]}", "it is given by the request itself")
    if reasoning_effort is not None:
        options["reasoning_effort"] = reasoning_effort
        if reasoning_effort == "none":
            options.setdefault("enable_thinking", False)
    return options


def _continues(request: ChatRequest) -> bool:
    if not request.continue_final_message:
        return False
    if request.add_generation_prompt:
        refuse("continue_final_message", "it excludes add_generation_prompt")
    if request.messages[-1].role != "assistant":
        refuse("continue_final_message", "the last message is not the assistant's")
    return True


# --- single parameters --------------------------------------------------------------------------------


def sampling_params(request: RequestBase, top_logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=_or(request.temperature, 1.0),
        top_p=max(_or(request.top_p, 1.0), LEAST_TOP_P),
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        seed=(request.seed or 0) % 2**64,
        top_logprobs=top_logprobs,
        logit_bias=_biases(request.logit_bias),
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
    )


def _biases(biases: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Token ids come as JSON's keys, which are strings."""
    pairs = []
    for text, bias in (biases or {}).items():
        is_number = len(text) <= MAX_TOKEN_ID_CHARS and text.isascii() and text.isdigit()
        if not is_number or int(text) > MAX_U32:
            refuse("logit_bias", f"{text[:40]!r} is not a token id")
        pairs.append((int(text), bias))
    return tuple(pairs)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _chat_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            refuse("top_logprobs", "only allowed when logprobs is true")
        return None
    return request.top_logprobs or 0


def _chat_max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        refuse("max_tokens", f"it is {old} and max_completion_tokens is {new}; send one of them")
    return new if new is not None else old


def prompts_of(prompt: str | Sequence[str | int | list[int]], param: str, most: int) -> list[str | list[int]]:
    """Text, token ids, or a list of either. Raises InvalidRequestError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        refuse(param, "it is empty")
    token_ids = [item for item in prompt if isinstance(item, int)]
    if len(token_ids) == len(prompt):
        return [token_ids]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if len(prompts) != len(prompt):
        refuse(param, "token ids stand among texts; send token ids alone, or a list")
    if len(prompts) > most:
        refuse(param, f"{len(prompts)} are more than {most}")
    return prompts


# --- messages -----------------------------------------------------------------------------------------


def message_of(message: Message, index: int) -> ChatMessage:
    """A message as chat templates want it: text content, tool arguments as objects."""
    where = f"messages[{index}]"
    if message.role not in ROLES:
        refuse(f"{where}.role", f"unknown role {shortened(message.role)!r}; expected one of {', '.join(ROLES)}")
    refuse_unsupported(message, MESSAGE_DEFAULTS, f"{where}.")
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        refuse(f"{where}.content", "null is allowed with tool calls only")
    return {
        "role": message.role,
        "content": _content(message.content, where),
        "name": message.name,
        "reasoning_content": message.reasoning_content,
        "tool_calls": _tool_calls(message, where),
        "tool_call_id": message.tool_call_id,
    }


def _content(content: str | list[TextPart] | None, where: str) -> str | None:
    """Parts are joined by line breaks, as vLLM does for templates that want text."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join([_part(part, f"{where}.content[{n}]") for n, part in enumerate(content)])


def _part(part: TextPart, where: str) -> str:
    if part.type != "text":
        refuse(f"{where}.type", f"{shortened(part.type)!r} is not supported; send text")
    refuse_unsupported(part, PART_DEFAULTS, f"{where}.")
    if part.text is None:
        refuse(f"{where}.text", "a text part needs it")
    return part.text


def _tool_calls(message: Message, where: str) -> list[dict[str, Any]] | None:
    if not message.tool_calls:
        return None
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": arguments_of(call.function.arguments, f"{where}.tool_calls[{n}].function.arguments"),
            },
        }
        for n, call in enumerate(message.tool_calls)
    ]


def arguments_of(arguments: str | dict[str, Any] | None, param: str) -> dict[str, Any]:
    """Templates write arguments with `tojson` and so want the object, not its JSON."""
    if not arguments:
        return {}
    if isinstance(arguments, dict):
        return arguments
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        refuse(param, "not a JSON object")
