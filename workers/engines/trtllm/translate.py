"""Our requests as arguments of TensorRT-LLM's `LLM.generate_async`, its results as deltas, its state as tickets. Pure.

Shapes are those of TensorRT-LLM 1.3 / 1.4.0rc1: sampling_params.py, disaggregated_params.py, executor/result.py.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvmesh.protocol.errors import EngineError, TransferError
from kvmesh.protocol.messages import (
    UNREADABLE,
    Delta,
    FinishReason,
    GenerateRequest,
    Guide,
    GuideKind,
    Ticket,
    TokenLogprob,
    unpack_tokens,
)
from kvmesh.workers.checks import check_prompt
from kvmesh.workers.choices import choice_regex

BACKEND = "trtllm"
MAX_OPAQUE_BYTES = 4 << 20

_Token = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
_Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class ContextState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of the prefill's DisaggregatedParams that a decode engine gets; travels as msgpack in Ticket.opaque."""

    opaque_state: Annotated[bytes, Meta(max_length=MAX_OPAQUE_BYTES)] | None
    first_gen_tokens: Annotated[tuple[_Token, ...], Meta(min_length=1, max_length=64)]
    ctx_request_id: _Id | None = None
    disagg_request_id: _Id | None = None
    draft_tokens: Annotated[tuple[_Token, ...], Meta(max_length=64)] | None = None
    ctx_dp_rank: Annotated[int, Meta(ge=0, le=0xFFFF)] | None = None
    ctx_info_endpoint: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:%/\[\]-]{1,300}$")] | None = None


def state_of(params: object) -> ContextState:
    """Return the state in DisaggregatedParams. Raise EngineError if no decode engine could use it."""
    fields = {
        name: tuple(value) if isinstance(value := getattr(params, name, None), list) else value
        for name in ContextState.__struct_fields__
    }
    try:
        state = msgspec.convert(fields, ContextState)
    except msgspec.ValidationError as error:
        raise EngineError(
            f"TensorRT-LLM offers no KV: {error}", hint="check --cache-transceiver-config.backend"
        ) from error
    if state.ctx_request_id is None and state.disagg_request_id is None:
        raise EngineError("TensorRT-LLM offers KV without a request id")
    return state


def encode_state(state: ContextState) -> bytes:
    return msgspec.msgpack.encode(state)


def read_ticket(ticket: Ticket, generated: Sequence[int]) -> ContextState:
    """Raises TransferError for a ticket that this engine must not see; it can still compute the prompt."""
    if ticket.backend != BACKEND:
        raise TransferError(f"a ticket of {ticket.backend!r}, {BACKEND!r} was expected")
    if not 0 < len(ticket.opaque) <= MAX_OPAQUE_BYTES:
        raise TransferError(f"a state of {len(ticket.opaque)} bytes; at most {MAX_OPAQUE_BYTES} are accepted")
    try:
        state = msgspec.msgpack.decode(ticket.opaque, type=ContextState)
    except UNREADABLE as error:
        raise TransferError(f"unreadable state: {error}", hint="run one version everywhere") from error
    first = state.first_gen_tokens
    if tuple(generated[-len(first) :]) != first:
        raise TransferError("a ticket for another first token than the answer has")
    return state


def input_ids(request: GenerateRequest, context_tokens: int, state: ContextState | None) -> list[int]:
    """Return the prompt, without the tokens that came with a `state`. Raises InvalidRequestError."""
    generated = request.generated if state is None else request.generated[: -len(state.first_gen_tokens)]
    prompt = unpack_tokens(request.prompt)
    check_prompt(len(prompt), len(generated), context_tokens)
    return [*prompt, *generated]


def sampling_fields(request: GenerateRequest, state: ContextState | None) -> dict[str, Any]:
    """Fields of SamplingParams but `guided_decoding`. Tokens that came with a `state` count as this engine's."""
    sampling, stop = request.sampling, request.stop
    done = len(request.generated) - (0 if state is None else len(state.first_gen_tokens))
    fields: dict[str, Any] = {
        "max_tokens": max(1, stop.max_tokens - done),
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "ignore_eos": stop.ignore_eos,
        "include_stop_str_in_output": True,  # else the stop token is taken off the tokens
        "detokenize": False,
        "add_special_tokens": False,
    }
    if sampling.temperature > 0:
        fields["temperature"] = sampling.temperature
    else:  # 0 is no temperature there
        fields |= {"top_k": 1, "top_p": 1.0}
    if (min_tokens := stop.min_tokens - done) > 0:
        fields["min_tokens"] = min(min_tokens, fields["max_tokens"])
    if stop.stop_token_ids:
        fields["stop_token_ids"] = list(stop.stop_token_ids)
    if sampling.top_logprobs is not None:
        fields["logprobs"] = max(1, sampling.top_logprobs)  # 0 would turn them off
    return fields


def guide_fields(guide: Guide) -> dict[str, Any]:
    """Fields of GuidedDecodingParams."""
    match guide.kind:
        case GuideKind.JSON:
            return {"json_object": True}
        case GuideKind.JSON_SCHEMA:
            return {"json": guide.value}
        case GuideKind.REGEX:
            return {"regex": guide.value}
        case GuideKind.GRAMMAR:
            return {"grammar": guide.value}
        case GuideKind.CHOICE:
            return {"regex": choice_regex(guide.value)}


class TrtllmAnswer:
    """Reads one result after each of its steps: its tokens and logprobs are all so far.

    `given`: tokens at its beginning that the prefill engine computed and reported.
    """

    def __init__(self, *, top_logprobs: int | None, given: Sequence[int] = ()) -> None:
        self.has_ended = False
        self._top_logprobs = top_logprobs
        self._given = list(given)
        self._sent_tokens = len(given)
        self._is_first = True

    def on_result(self, result: Any) -> Delta | None:
        """Return what is new, None if nothing is. Raise EngineError for an answer that was given up."""
        if not result.outputs:
            return None
        output = result.outputs[0]
        all_tokens: Sequence[int] = output.token_ids or ()
        reason = self._reason(output.finish_reason, is_finished=bool(result.finished))
        if len(all_tokens) < self._sent_tokens and reason is None:
            return None
        if list(all_tokens[: len(self._given)]) != self._given:
            raise EngineError("TensorRT-LLM continues from another first token than it was given")
        tokens = tuple(all_tokens[self._sent_tokens :])
        if not tokens and reason is None:
            return None
        delta = Delta(
            token_ids=tokens,
            finish_reason=reason,
            logprobs=self._logprobs(output.logprobs or (), tokens),
            cached_tokens=_cached(result) if self._is_first else None,
            stop_token=tokens[-1] if reason is FinishReason.STOP and tokens else None,
        )
        self._sent_tokens += len(tokens)
        self._is_first = False
        return delta

    def _reason(self, reason: str | None, *, is_finished: bool) -> FinishReason | None:
        if not is_finished:
            return None
        self.has_ended = True
        match reason:
            case "stop":
                return FinishReason.STOP
            case "length":
                return FinishReason.LENGTH
        raise EngineError(f"TensorRT-LLM gave the answer up: {reason or 'without a reason'}")

    def _logprobs(self, logprobs: Sequence[Any], tokens: Sequence[int]) -> tuple[TokenLogprob, ...] | None:
        """Return the logprobs of the new tokens. A token has a dict {token id: Logprob}, or its logprob alone.

        The given tokens may have none.
        """
        if self._top_logprobs is None:
            return None
        new = logprobs[len(logprobs) - len(tokens) :] if tokens else ()
        if len(logprobs) < len(tokens):
            raise EngineError(f"TensorRT-LLM gave {len(logprobs)} logprobs for {len(tokens)} tokens")
        return tuple(_logprob(token, entry, self._top_logprobs) for token, entry in zip(tokens, new, strict=True))


def _logprob(token: int, entry: Any, top: int) -> TokenLogprob:
    if not isinstance(entry, Mapping):
        return TokenLogprob(token, float(entry))
    if token not in entry:
        raise EngineError(f"TensorRT-LLM gave no logprob for token {token}")
    ranked = sorted(((other, one.logprob) for other, one in entry.items()), key=lambda pair: -pair[1])
    return TokenLogprob(token, entry[token].logprob, tuple(ranked[:top]))


def _cached(result: Any) -> int | None:
    cached = getattr(result, "cached_tokens", None)
    return cached if isinstance(cached, int) else None
