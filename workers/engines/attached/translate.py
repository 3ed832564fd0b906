"""Our requests as bodies of /v1/completions, and what comes back as deltas. Pure.

What a server does not honour it drops without a word, so what it is not known to honour is refused here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvmesh.protocol.errors import EngineError, InvalidRequestError, WireError
from kvmesh.protocol.messages import (
    UNREADABLE,
    Delta,
    EmbedRequest,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    StopConditions,
    TokenLogprob,
    unpack_tokens,
)
from kvmesh.workers.engines.attached.refusals import ServerErrorBody
from kvmesh.workers.engines.attached.server import AttachedServer, Body, ServerKind

MAX_CHUNK_TOKENS = 1 << 20
MAX_DIMENSIONS = 1 << 16

TOKEN_BYTES = 4  # of a packed prompt

_PLACEHOLDER = "token_id:"  # how vLLM writes a token where it is asked for ids in place of texts

_TokenId = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
_TokenIds = Annotated[list[_TokenId], Meta(max_length=MAX_CHUNK_TOKENS)]


class AnswerLogprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class AnswerChoice(msgspec.Struct):
    text: str | None = None
    token_ids: _TokenIds | None = None
    finish_reason: str | None = None
    logprobs: AnswerLogprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: Annotated[int, Meta(ge=0)] | None = None


class AnswerUsage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class ServerAnswer(msgspec.Struct):
    """A whole answer, or one event of a stream."""

    choices: list[AnswerChoice] = []
    usage: AnswerUsage | None = None
    error: ServerErrorBody | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def cached_tokens(self) -> int | None:
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _Vector(msgspec.Struct):
    embedding: Annotated[list[float], Meta(min_length=1, max_length=MAX_DIMENSIONS)]


class _Vectors(msgspec.Struct):
    data: Annotated[list[_Vector], Meta(min_length=1, max_length=1)]


def check_honoured(request: GenerateRequest, kind: ServerKind) -> None:
    """Raise InvalidRequestError for a parameter that this kind of server would drop."""
    for name, default in _PLAIN.items():
        if _value_of(request, name) != default:
            _check_name(name, kind)


def _check_name(name: str, kind: ServerKind) -> None:
    if name not in kind.honours:
        raise InvalidRequestError(
            f"this worker stands for a server of kind {kind.name}, which is not known to honour {name}",
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


def prompt_of(request: GenerateRequest) -> list[int]:
    """Return all tokens before the next one: the prompt, and what was generated of the answer."""
    return [*unpack_tokens(request.prompt), *request.generated]


def body_of(
    request: GenerateRequest, server: AttachedServer, prompt: list[int] | str, *, max_tokens: int, stream: bool
) -> Body:
    """Return the body of /v1/completions. It names every parameter that matters, because a server takes the others from
    its model's generation_config.json.

    Servers make a generator of `seed` that begins with the request. The number of tokens that exist is added to it, so
    that an answer that continues here does not repeat the draws of its beginning.
    """
    sampling, kind = request.sampling, server.kind
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
        body["seed"] = (sampling.seed + len(request.generated)) & kind.max_seed
    if stream and kind.takes_stream_options:
        body["stream_options"] = {"include_usage": True}
    return body | kind.fields(request, max_tokens)


def embedding_body(request: EmbedRequest, server: AttachedServer, text: list[int] | str) -> Body:
    """Return the body of /v1/embeddings. Raise InvalidRequestError for a tenant's text on a server without salts."""
    body: Body = {"model": request.lora or server.model, "input": text, "encoding_format": "float"}
    if request.cache_salt is None:
        return body
    _check_name("cache_salt", server.kind)
    return body | {"cache_salt": request.cache_salt} if server.kind.salts_embeddings else body


def read_vector(data: bytes) -> bytes:
    """Return the vector as float32 little endian, scaled to length 1. Raise WireError for any other answer."""
    try:
        vector = np.array(msgspec.json.decode(data, type=_Vectors).data[0].embedding, dtype="<f8")
    except UNREADABLE as error:
        raise WireError(f"the server's vector cannot be read: {error}", hint="is it OpenAI-compatible?") from error
    with np.errstate(over="ignore"):
        length = float(np.linalg.norm(vector))
    if not 0 < length < float("inf"):  # nor NaN
        raise WireError(f"the server gave a vector of length {length}")
    told: bytes = (vector / length).astype("<f4").tobytes()
    return told


def read_answer(data: bytes) -> ServerAnswer:
    """Return the answer of /v1/completions. Raises WireError for any other body."""
    try:
        answer = msgspec.json.decode(data, type=ServerAnswer)
    except UNREADABLE as error:
        raise WireError(f"the server's answer cannot be read: {error}", hint="is it OpenAI-compatible?") from error
    if len(answer.choices) > 1:
        raise WireError(f"the server gave {len(answer.choices)} answers where one was asked for")
    return answer


def delta_of(
    answer: ServerAnswer, top_logprobs: int | None, tokenize: Callable[[str], Sequence[int]] | None = None
) -> Delta | None:
    """Return what one event, or a whole answer, adds; None if that is nothing.

    `tokenize`: for servers that return texts alone. Raise EngineError for an answer that was cut off, WireError for one
    without token ids.
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


def _tokens_of(choice: AnswerChoice, tokenize: Callable[[str], Sequence[int]] | None) -> Sequence[int]:
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


def _logprobs(told: AnswerLogprobs | None, tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...] | None:
    """Return one logprob per token, and before them those of an echoed prompt: from its second token on."""
    if told is None or len(told.token_logprobs) < len(tokens):
        if not tokens:
            return None
        raise WireError(f"no logprobs came for {len(tokens)} tokens")
    num_echoed = len(told.token_logprobs) - len(tokens)
    echoed = [_placeholder_id(name) for name in told.tokens[:num_echoed]]
    tops = told.top_logprobs or [None] * len(told.token_logprobs)
    if len(tops) != len(told.token_logprobs) or len(echoed) != num_echoed:
        raise WireError(f"{len(tops)} lists of likeliest tokens came for {len(told.token_logprobs)} tokens")
    found = zip([*echoed, *tokens], told.token_logprobs, tops, strict=True)
    logprobs = [_logprob(token, logprob, likeliest or {}, top) for token, logprob, likeliest in found]
    return tuple(logprobs[1:] if num_echoed else logprobs)


def _logprob(token: int, logprob: float | None, likeliest: Mapping[str, float], top: int) -> TokenLogprob:
    """Return the logprob of a token. vLLM's top has the token even if it is not among the `top` likeliest."""
    return TokenLogprob(token, -9999.0 if logprob is None else logprob, _likeliest(likeliest, top))


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
