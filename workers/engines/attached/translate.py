"""Our requests as bodies of /v1/completions, and what comes back as deltas. Pure.

What a server does not honour it drops without a word, so what it is not known to honour is refused here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from protocol.errors import ContextLengthError, EngineError, InvalidRequestError, WireError
from protocol.messages import (
    Delta,
    EmbedRequest,
    Feature,
    FinishReason,
    GenerateRequest,
    Guide,
    GuideKind,
    SamplingParams,
    StopConditions,
    TokenLogprob,
    unpack_tokens,
)
from workers.choices import choices_of
from workers.engines.attached.probe import Flavour, Server
from workers.engines.attached.refusals import ErrorBody

MAX_CHUNK_TOKENS = 1 << 20
MAX_DIMENSIONS = 1 << 16

Body = dict[str, Any]  # of a request, to be written as JSON

TOKEN_BYTES = 4  # of a packed prompt

_I64 = 0x7FFF_FFFF_FFFF_FFFF
_I31 = 0x7FFF_FFFF
_PLACEHOLDER = "token_id:"  # how vLLM writes a token where it is asked for ids in place of texts

_FEATURES: Mapping[Flavour, tuple[Feature, ...]] = {
    Flavour.VLLM: (
        Feature.COMPLETIONS,
        Feature.LOGPROBS,
        Feature.LOGIT_BIAS,
        Feature.ALLOWED_TOKENS,
        Feature.GUIDED,
    ),
}

_BASE = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"})
_ENGINE = _BASE | {"top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids"}
_HONOURED: Mapping[Flavour, frozenset[str]] = {
    Flavour.VLLM: _ENGINE | {"cache_salt"},
    Flavour.SGLANG: _ENGINE,
    Flavour.TRTLLM: _ENGINE,
    Flavour.LLAMACPP: _BASE | {"top_k", "min_p", "repetition_penalty", "ignore_eos", "cache_salt"},
    Flavour.OPENAI: _BASE,
}

_TokenId = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
_TokenIds = Annotated[list[_TokenId], Meta(max_length=MAX_CHUNK_TOKENS)]


class Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    token_ids: _TokenIds | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: Annotated[int, Meta(ge=0)] | None = None


class Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class Answer(msgspec.Struct):
    """A whole answer, or one event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: ErrorBody | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def cached_tokens(self) -> int | None:
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _Vector(msgspec.Struct):
    embedding: Annotated[list[float], Meta(min_length=1, max_length=MAX_DIMENSIONS)]


class _Vectors(msgspec.Struct):
    data: Annotated[list[_Vector], Meta(min_length=1, max_length=1)]


def features_of(server: Server) -> tuple[Feature, ...]:
    generates = _FEATURES.get(server.flavour, (Feature.COMPLETIONS,)) if server.generates else ()
    return (*generates, Feature.EMBEDDINGS) if server.embeds else generates


def check_honoured(request: GenerateRequest, flavour: Flavour) -> None:
    """Raises InvalidRequestError for a parameter that this kind of server would not heed."""
    for name, default in _PLAIN.items():
        if _value_of(request, name) != default:
            _check_name(name, flavour)


def _check_name(name: str, flavour: Flavour) -> None:
    if name not in _HONOURED[flavour]:
        raise InvalidRequestError(
            f"this worker stands for a server of kind {flavour.value}, which is not known to honour {name}",
            hint="leave it out, or attach a vLLM server",
            param=name,
        )


_PLAIN: Mapping[str, object] = {
    **{name: getattr(SamplingParams(), name) for name in ("top_k", "min_p", "repetition_penalty")},
    **{name: getattr(StopConditions(), name) for name in ("ignore_eos", "min_tokens", "stop_token_ids")},
    "cache_salt": None,
}


def _value_of(request: GenerateRequest, name: str) -> object:
    if name == "cache_salt":
        return request.cache_salt
    return getattr(request.sampling if hasattr(request.sampling, name) else request.stop, name)


def check_length(request: GenerateRequest, context_tokens: int) -> None:
    """Raises InvalidRequestError, ContextLengthError: servers refuse the same, each in words of its own."""
    num_tokens = len(request.prompt) // TOKEN_BYTES + len(request.generated)
    if not request.prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    if num_tokens >= context_tokens:
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens, the context of this model {context_tokens}",
            hint="shorten the prompt",
        )


def prompt_of(request: GenerateRequest) -> list[int]:
    """What there is before the next token: the prompt, and what was generated of the answer."""
    return [*unpack_tokens(request.prompt), *request.generated]


def body_of(
    request: GenerateRequest, server: Server, prompt: list[int] | str, *, max_tokens: int, stream: bool
) -> Body:
    """All that matters is said: what a server is not told it takes from its model's generation_config.json.

    Of `seed` servers make a generator that begins with the request, so an answer that goes on here does not repeat
    the draws of its beginning: the number of tokens that exist is added.
    """
    sampling, stop, flavour = request.sampling, request.stop, server.flavour
    body: Body = {
        "model": request.lora or server.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": stream,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.temperature > 0:
        body["seed"] = (sampling.seed + len(request.generated)) & (_I64 if flavour is Flavour.VLLM else _I31)
    if stream and flavour is not Flavour.OPENAI:
        body["stream_options"] = {"include_usage": True}
    if flavour is Flavour.LLAMACPP:
        body |= _llamacpp_fields(request)
    elif flavour is not Flavour.OPENAI:
        body |= {
            "top_k": sampling.top_k if sampling.top_k else -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "ignore_eos": stop.ignore_eos,
            "min_tokens": min(max(stop.min_tokens - len(request.generated), 0), max_tokens),
            "stop_token_ids": list(stop.stop_token_ids),
        }
    if flavour is Flavour.VLLM:
        body |= _vllm_fields(request)
    return body


def embedding_body(request: EmbedRequest, server: Server, text: list[int] | str) -> Body:
    """Of /v1/embeddings. Raises InvalidRequestError for a tenant's text that the server would not keep apart."""
    body: Body = {"model": request.lora or server.model, "input": text, "encoding_format": "float"}
    if request.cache_salt is None:
        return body
    _check_name("cache_salt", server.flavour)
    return body | {"cache_salt": request.cache_salt} if server.flavour is Flavour.VLLM else body


def read_vector(data: bytes) -> bytes:
    """float32 little endian, of length 1, whatever length it had. Raises WireError for what is no such answer."""
    try:
        vector = np.array(msgspec.json.decode(data, type=_Vectors).data[0].embedding, dtype="<f8")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"the server's vector cannot be read: {error}", hint="is it OpenAI-compatible?") from error
    with np.errstate(over="ignore"):
        length = float(np.linalg.norm(vector))
    if not 0 < length < float("inf"):  # nor NaN
        raise WireError(f"the server gave a vector of length {length}")
    told: bytes = (vector / length).astype("<f4").tobytes()
    return told


def _llamacpp_fields(request: GenerateRequest) -> dict[str, Any]:
    """Its prompt cache knows no tenants: whoever wants to share with nobody does not use it."""
    return {
        "top_k": request.sampling.top_k,
        "min_p": request.sampling.min_p,
        "repeat_penalty": request.sampling.repetition_penalty,
        "ignore_eos": request.stop.ignore_eos,
        "cache_prompt": request.cache_salt is None,
    }


def _vllm_fields(request: GenerateRequest) -> dict[str, Any]:
    sampling = request.sampling
    fields: dict[str, Any] = {"return_token_ids": True, "request_id": request.request_id}
    if request.cache_salt:
        fields["cache_salt"] = request.cache_salt
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.allowed_token_ids:
        fields["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.top_logprobs is not None:
        fields |= {"logprobs": sampling.top_logprobs, "return_tokens_as_token_ids": True}
    if request.guide is not None:
        fields["structured_outputs"] = structured_outputs(request.guide)
    return fields


def structured_outputs(guide: Guide) -> dict[str, Any]:
    """A guide in vLLM's words. Raises InvalidRequestError if its value is not JSON where it has to be."""
    match guide.kind:
        case GuideKind.JSON:
            return {"json_object": True}
        case GuideKind.JSON_SCHEMA:
            return {"json": _json(guide.value)}
        case GuideKind.CHOICE:
            return {"choice": choices_of(guide.value)}
        case GuideKind.REGEX:
            return {"regex": guide.value}
        case GuideKind.GRAMMAR:
            return {"grammar": guide.value}


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"a guide that is not JSON: {error}", param="guide") from error


def read_answer(data: bytes) -> Answer:
    """Raises WireError for what is no answer of /v1/completions."""
    try:
        answer = msgspec.json.decode(data, type=Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"the server's answer cannot be read: {error}", hint="is it OpenAI-compatible?") from error
    if len(answer.choices) > 1:
        raise WireError(f"the server gave {len(answer.choices)} answers where one was asked for")
    return answer


def delta_of(
    answer: Answer, top_logprobs: int | None, tokenize: Callable[[str], Sequence[int]] | None = None
) -> Delta | None:
    """What one event, or a whole answer, adds; None: nothing. `tokenize`: for servers that return texts alone.

    Raises EngineError for an answer that ended otherwise than by itself, WireError for one without token ids.
    """
    if not answer.choices:
        return None
    choice = answer.choices[0]
    tokens = tuple(_tokens_of(choice, tokenize))
    finish = _finish_reason(choice.finish_reason)
    if not tokens and finish is None:
        return None
    return Delta(
        token_ids=tokens,
        finish_reason=finish,
        logprobs=None if top_logprobs is None else _logprobs(choice.logprobs, tokens, top_logprobs),
        cached_tokens=answer.cached_tokens,
        stop_token=tokens[-1] if finish is FinishReason.STOP and tokens and tokenize is None else None,
    )


def _tokens_of(choice: Choice, tokenize: Callable[[str], Sequence[int]] | None) -> Sequence[int]:
    if tokenize is not None:
        return tokenize(choice.text or "")
    if choice.token_ids is None:
        raise WireError(
            "the server returns no token ids", hint="vLLM does from 0.10.2 on (return_token_ids): attach a newer one"
        )
    return choice.token_ids


def _finish_reason(reason: str | None) -> FinishReason | None:
    match reason:
        case None | "":
            return None
        case "stop":
            return FinishReason.STOP
        case "length":
            return FinishReason.LENGTH
    raise EngineError(f"the server ended the answer with {reason[:80]!r}", hint="see its log")


def _logprobs(told: Logprobs | None, tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...] | None:
    """One per token. The chosen one is among vLLM's top even where it is not of the `top` likeliest."""
    if told is None or len(told.token_logprobs) != len(tokens):
        if not tokens:
            return None
        raise WireError(f"no logprobs came for {len(tokens)} tokens")
    tops = told.top_logprobs or [None] * len(tokens)
    if len(tops) != len(tokens):
        raise WireError(f"{len(tops)} lists of likeliest tokens came for {len(tokens)} tokens")
    return tuple(
        TokenLogprob(token, -9999.0 if logprob is None else logprob, _likeliest(likeliest or {}, top))
        for token, logprob, likeliest in zip(tokens, told.token_logprobs, tops, strict=True)
    )


def _likeliest(told: Mapping[str, float], top: int) -> tuple[tuple[int, float], ...]:
    ranked = sorted(((_placeholder_id(name), logprob) for name, logprob in told.items()), key=lambda pair: -pair[1])
    return tuple(ranked[:top])


def _placeholder_id(name: str) -> int:
    digits = name.removeprefix(_PLACEHOLDER)
    if digits == name or not digits.isascii() or not digits.isdigit() or len(digits) > 10:
        raise WireError(f"a token called {name[:40]!r} where {_PLACEHOLDER}<number> was expected")
    return int(digits)


def merged(deltas: Iterable[Delta]) -> Delta | None:
    """Deltas that came at once, as one; None if there are none."""
    parts = list(deltas)
    if len(parts) <= 1:
        return parts[0] if parts else None
    logprobs = tuple(one for part in parts for one in part.logprobs or ())
    cached = [part.cached_tokens for part in parts if part.cached_tokens is not None]
    return Delta(
        token_ids=tuple(token for part in parts for token in part.token_ids),
        finish_reason=parts[-1].finish_reason,
        logprobs=logprobs or None,
        cached_tokens=cached[0] if cached else None,
        stop_token=parts[-1].stop_token,
    )
