"""Read and check the body of a chat or a text completion: JSON in, a `ParsedRequest` or an error that names the
parameter out. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from kvmesh.frontend.arguments import arguments_of
from kvmesh.frontend.bodies import Only, decode_body, not_supported, only, refuse, refuse_unsupported, shortened
from kvmesh.frontend.openai.shapes import (
    MAX_CHOICES,
    ROLES,
    AllowedToolsChoice,
    ChatRequest,
    CompletionRequest,
    FunctionChoice,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedToolChoice,
    RequestBase,
    ResponseFormat,
    TextPart,
    ToolSpec,
)
from kvmesh.frontend.parameters import (
    LEAST_TOP_P,
    DeclaredTool,
    ToolWish,
    check_tool_name,
    guide_of,
    hints_of,
    or_default,
    schema_guide,
    template_options,
    tools_of,
)
from kvmesh.frontend.request import ParamNames, ParsedRequest, ToolChoice, Tools
from kvmesh.frontend.shapes import MAX_U32
from kvmesh.frontend.template_probes import ChatMessage
from kvmesh.protocol.messages import Guide, GuideKind, SamplingParams

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions; chats default to what the context leaves
MAX_TOKEN_ID_CHARS = 10
CHAT_NAMES = ParamNames(prompt="messages")
COMPLETION_NAMES = ParamNames(prompt="prompt")


class _MaybeMessages(msgspec.Struct):
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_messages_decoder = msgspec.json.Decoder(_MaybeMessages)


def parse_chat(body: bytes) -> ParsedRequest:
    """Raises InvalidRequestError."""
    request = decode_body(body, _chat_decoder)
    refuse_unsupported(request, CHAT_DEFAULTS)
    tools = _tools(request)
    max_tokens = _chat_max_tokens(request)
    check_lengths(request, max_tokens)
    n = _choices(request.n or 1, 1, request)
    return ParsedRequest(
        names=CHAT_NAMES,
        messages=[message_of(message, n) for n, message in enumerate(request.messages)],
        n=n,
        best_of=n,
        sampling=sampling_params(request, _chat_logprobs(request)),
        max_tokens=max_tokens,
        guide=guide_of(_format(request.response_format), tools, "response_format"),
        tools=tools,
        template_options=template_options(request.chat_template_kwargs, request.reasoning_effort, request.documents),
        add_generation_prompt=request.add_generation_prompt is not False and not request.continue_final_message,
        continue_final_message=_continues(request),
        **common_fields(request),
    )


def parse_completion(body: bytes) -> ParsedRequest:
    """Raises InvalidRequestError."""
    request = decode_body(body, _completion_decoder)
    max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and not request.echo:
        refuse("max_tokens", "0 leaves nothing to answer with; send 1 or more, or echo for the prompt alone")
    check_lengths(request, max_tokens)
    prompts = prompts_of(request.prompt, "prompt", MAX_CHOICES)
    n = request.n or 1
    return ParsedRequest(
        names=COMPLETION_NAMES,
        prompts=prompts,
        suffix=request.suffix or "",
        echo=bool(request.echo),
        n=_choices(n, len(prompts), request),
        best_of=_best_of(request, n, len(prompts)),
        sampling=_completion_sampling(request),
        max_tokens=max_tokens,
        guide=_format(request.response_format),
        **common_fields(request),
    )


def parse_either(body: bytes) -> ParsedRequest:
    """A body of either endpoint: that of a chat has `messages`. Raises InvalidRequestError."""
    is_chat = decode_body(body, _messages_decoder).messages is not msgspec.UNSET
    return parse_chat(body) if is_chat else parse_completion(body)


def check_lengths(request: RequestBase, max_tokens: int | None, max_param: str = "max_tokens") -> None:
    """Raise InvalidRequestError for options of a stream without a stream, and for limits that exclude each other."""
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        refuse("min_tokens", f"{min_tokens} is more than {max_param}, {max_tokens}")
    if request.stream_options is not None and not request.stream:
        refuse("stream_options", "only allowed when stream is true")


def common_fields(request: RequestBase) -> dict[str, Any]:
    """Return what the endpoints share, as fields of ParsedRequest."""
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
        "hints": hints_of(request.kvmesh, request.user),
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


def _completion_sampling(request: CompletionRequest) -> SamplingParams:
    """Return the sampling of a text completion. With `echo`, logprobs are those of the prompt, too."""
    sampling = sampling_params(request, request.logprobs)
    if not request.echo or request.logprobs is None:
        return sampling
    if request.suffix:
        not_supported("suffix", "with echo and logprobs", hint="send one of the three less")
    return msgspec.structs.replace(sampling, prompt_logprobs=request.logprobs)


# --- parameters that are known and not supported ------------------------------------------------------

CHAT_DEFAULTS: Mapping[str, Only] = {
    "functions": only([], hint="send tools"),
    "function_call": only("none", hint="send tools and tool_choice"),
    "modalities": only([], ["text"]),
    "audio": only(),
    "web_search_options": only(),
    "moderation": only(),
}
MESSAGE_DEFAULTS: Mapping[str, Only] = {"audio": only(), "function_call": only(hint="send tool_calls")}
PART_DEFAULTS: Mapping[str, Only] = {
    name: only(hint="send text") for name in ("image_url", "input_audio", "file", "refusal", "video_url")
}


# --- tools and structured output ----------------------------------------------------------------------


def _tools(request: ChatRequest) -> Tools | None:
    """Return None if the model is to know of no tool."""
    if not request.tools and request.tool_choice is None:
        return None
    wish = wish_of(request.tool_choice)
    if wish.choice is ToolChoice.NONE:
        return None
    return tools_of(declared(request.tools or ()), wish, parallel=request.parallel_tool_calls is not False)


def declared(specs: Sequence[ToolSpec]) -> list[DeclaredTool]:
    """Raise InvalidRequestError for a name that cannot be used."""
    for n, spec in enumerate(specs):
        check_tool_name(spec.function.name, f"tools[{n}].function.name")
    functions = [spec.function for spec in specs]
    return [DeclaredTool(each.name, each.description, each.parameters, each.strict) for each in functions]


def wish_of(choice: str | NamedToolChoice | None) -> ToolWish:
    match choice:
        case NamedToolChoice(type="function", function=FunctionChoice(name=name), allowed_tools=None):
            return ToolWish(ToolChoice.NAMED, name)
        case NamedToolChoice(type="allowed_tools", function=None, allowed_tools=AllowedToolsChoice() as allowed):
            names = tuple([tool.function.name for tool in allowed.tools])
            return ToolWish(ToolChoice(allowed.mode), "", names, "tool_choice.allowed_tools.tools")
        case NamedToolChoice(type=kind):
            refuse(f"tool_choice.{kind}", f"a choice of type {kind!r} needs it, and nothing else")
    return ToolWish(ToolChoice(choice or "auto"))


def _format(response_format: ResponseFormat | None) -> Guide | None:
    match response_format:
        case JsonObjectFormat():
            return Guide(kind=GuideKind.JSON)
        case JsonSchemaFormat():
            wanted = response_format.json_schema
            return schema_guide(wanted.schema, "response_format.json_schema.schema", strict=wanted.strict)
    return None


# --- chat templates -----------------------------------------------------------------------------------


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
        temperature=or_default(request.temperature, 1.0),
        top_p=max(or_default(request.top_p, 1.0), LEAST_TOP_P),
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=or_default(request.repetition_penalty, 1.0),
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
    if set(map(type, prompt)) == {int}:  # a prompt may have a million
        return [cast(list[int], prompt)]
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
    thoughts = message.reasoning_content or message.reasoning
    content = message.content
    if content is None and message.role == "assistant":  # OpenAI's SDK appends a refusal to its history
        content = message.refusal
    if content is None and not (message.role == "assistant" and (message.tool_calls or thoughts)):
        refuse(f"{where}.content", "null is allowed with tool calls, reasoning or a refusal only")
    return {
        "role": message.role,
        "content": _content(content, where),
        "name": message.name,
        "reasoning_content": thoughts,
        "tool_calls": _tool_calls(message),
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


def _tool_calls(message: Message) -> list[dict[str, Any]] | None:
    if not message.tool_calls:
        return None
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": arguments_of(call.function.arguments)},
        }
        for call in message.tool_calls
    ]
