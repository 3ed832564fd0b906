"""Read and check a request body: JSON in, a `Call` or an error that names the parameter out. Pure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

import msgspec

from frontend.generator import Hints
from frontend.openai import ChatRequest, CompletionRequest, KvmeshOptions, Message, RequestBase, TextPart
from frontend.templates import ChatMessage
from protocol.errors import InvalidRequestError
from protocol.messages import SamplingParams

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions; chats default to what the context leaves


class Endpoint(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request, independent of the endpoint's spelling. `prompt`: messages, text or token ids."""

    endpoint: Endpoint
    model: str
    messages: list[ChatMessage] | None  # exactly one of these three is given
    text: str | None
    token_ids: list[int] | None
    stream: bool
    include_usage: bool
    sampling: SamplingParams  # seed as asked for
    has_seed: bool
    max_tokens: int | None
    min_tokens: int
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    cache_salt: str | None
    hints: Hints
    trace: bool


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
    return _call(
        request,
        Endpoint.CHAT,
        messages=[_message(message, n) for n, message in enumerate(request.messages)],
        top_logprobs=_chat_logprobs(request),
        max_tokens=_chat_max_tokens(request),
    )


def parse_completion(body: bytes) -> Call:
    """Raises InvalidRequestError."""
    request = decode_body(body, _completion_decoder)
    refuse_unsupported(request, COMPLETION_DEFAULTS)
    text, token_ids = _prompt(request.prompt)
    return _call(
        request,
        Endpoint.COMPLETIONS,
        text=text,
        token_ids=token_ids,
        top_logprobs=request.logprobs,
        max_tokens=request.max_tokens or COMPLETION_MAX_TOKENS,
    )


def parse_either(body: bytes) -> Call:
    """A body of either endpoint: that of a chat has `messages`. Raises InvalidRequestError."""
    is_chat = decode_body(body, _messages_decoder).messages is not msgspec.UNSET
    return parse_chat(body) if is_chat else parse_completion(body)


def _call(
    request: RequestBase,
    endpoint: Endpoint,
    *,
    top_logprobs: int | None,
    max_tokens: int | None,
    messages: list[ChatMessage] | None = None,
    text: str | None = None,
    token_ids: list[int] | None = None,
) -> Call:
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        _refuse("min_tokens", f"{min_tokens} is more than max_tokens, {max_tokens}")
    if request.stream_options is not None and not request.stream:
        _refuse("stream_options", "only allowed when stream is true")
    return Call(
        endpoint=endpoint,
        model=request.model,
        messages=messages,
        text=text,
        token_ids=token_ids,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        sampling=_sampling(request, top_logprobs),
        has_seed=request.seed is not None,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stops=_stops(request.stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        cache_salt=request.cache_salt,
        hints=_hints(request),
        trace=bool(request.kvmesh and request.kvmesh.trace),
    )


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
_PATH = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")


def decode_body(body: bytes, decoder: msgspec.json.Decoder[BodyT]) -> BodyT:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error}") from error


def validation_error(text: str) -> InvalidRequestError:
    """msgspec's words as OpenAI's: the message names the parameter, and so does `param`."""
    found = _PATH.search(text)
    path = found.group(1) if found else ""
    reason = text[: found.start()] if found else text
    if missing := _MISSING.match(reason):
        param = _join(path, missing.group(1))
        return InvalidRequestError(f"Missing required parameter: '{param}'", param=param)
    if unknown := _UNKNOWN.match(reason):
        param = _join(path, unknown.group(1))
        return InvalidRequestError(f"Unrecognized request argument supplied: {param}", param=param)
    if not path:
        return InvalidRequestError(f"Invalid request body: {reason[:1].lower()}{reason[1:]}")
    return InvalidRequestError(f"Invalid value for '{path}': {reason[:1].lower()}{reason[1:]}", param=path)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse(param: str, reason: str) -> NoReturn:
    raise InvalidRequestError(f"Invalid value for '{param}': {reason}", param=param)


def _not_supported(param: str, hint: str = "leave it out") -> NoReturn:
    raise InvalidRequestError(f"The parameter '{param}' is not supported", hint=hint, param=param)


# --- parameters that are known and not supported ------------------------------------------------------

Harmless = Callable[[Any], bool]


def _one_of(*values: object) -> Harmless:
    return lambda value: value in values


_COMMON_DEFAULTS: dict[str, Harmless] = {"n": _one_of(1), "logit_bias": _one_of({})}
CHAT_DEFAULTS: dict[str, Harmless] = _COMMON_DEFAULTS | {
    "functions": _one_of([]),
    "function_call": _one_of("none"),
    "response_format": _one_of({"type": "text"}),
    "modalities": _one_of([], ["text"]),
    "audio": _one_of(),
    "prediction": _one_of(),
    "reasoning_effort": _one_of(),
    "service_tier": _one_of("auto", "default"),
    "verbosity": _one_of("medium"),
    "web_search_options": _one_of(),
    "moderation": _one_of(),
}
COMPLETION_DEFAULTS: dict[str, Harmless] = _COMMON_DEFAULTS | {
    "best_of": _one_of(0, 1),
    "echo": _one_of(False),
    "suffix": _one_of(""),
}


def refuse_unsupported(request: RequestBase, defaults: dict[str, Harmless]) -> None:
    """A parameter that would change the answer is refused by name; its null or default is harmless."""
    for name, harmless in defaults.items():
        value = getattr(request, name)
        if value is not None and not harmless(value):
            _not_supported(name, "its default is accepted, or leave it out")
    if isinstance(request, ChatRequest):
        _refuse_tools(request)


def _refuse_tools(request: ChatRequest) -> None:
    """Tools may be sent along with tool_choice "none": they are then not shown to the model."""
    if request.tools and request.tool_choice != "none":
        _not_supported("tools", "send tool_choice 'none' or leave it out")
    if request.tool_choice not in (None, "none", "auto"):
        _not_supported("tool_choice", "send 'none' or leave it out")


# --- single parameters --------------------------------------------------------------------------------


def _sampling(request: RequestBase, top_logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        seed=(request.seed or 0) % 2**64,
        top_logprobs=top_logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _chat_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            _refuse("top_logprobs", "only allowed when logprobs is true")
        return None
    return request.top_logprobs or 0


def _chat_max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        _refuse("max_tokens", f"it is {old} and max_completion_tokens is {new}; send one of them")
    return new if new is not None else old


def _prompt(prompt: str | Sequence[str | int | list[int]]) -> tuple[str | None, list[int] | None]:
    """(text, None) or (None, token ids)."""
    match prompt:
        case str(text) | [str(text)]:
            return text, None
        case []:
            _refuse("prompt", "it is empty")
        case [list(token_ids)]:
            return None, token_ids
        case [int(), *_] if all(isinstance(token, int) for token in prompt):
            return None, [token for token in prompt if isinstance(token, int)]
    _refuse("prompt", "several prompts in one request are not supported; send one text or token list")


# --- messages -----------------------------------------------------------------------------------------


def _message(message: Message, index: int) -> ChatMessage:
    """A message as chat templates want it: text content, tool arguments as objects."""
    where = f"messages[{index}]"
    if message.role not in ROLES:
        _refuse(f"{where}.role", f"unknown role {message.role!r}; expected one of {', '.join(sorted(ROLES))}")
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            _not_supported(f"{where}.{name}")
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        _refuse(f"{where}.content", "null is allowed with tool calls only")
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
        _refuse(f"{where}.type", f"{part.type!r} is not supported; send text")
    if part.text is None:
        _refuse(f"{where}.text", "a text part needs it")
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
                "arguments": _arguments(call.function.arguments, f"{where}.tool_calls[{n}]"),
            },
        }
        for n, call in enumerate(message.tool_calls)
    ]


def _arguments(arguments: str | dict[str, Any] | None, where: str) -> dict[str, Any]:
    """Templates write arguments with `tojson` and so want the object, not its JSON."""
    if not arguments:
        return {}
    if isinstance(arguments, dict):
        return arguments
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        _refuse(f"{where}.function.arguments", "not a JSON object")
