"""Translate between the mesh's words and vLLM's. Pure, and without vLLM: plain fields in, plain fields out.

A decode leg asks vLLM for the prompt alone and lets it draw the first token again. vLLM pulls as many tokens as the
prompt has; with one more it would wait for a block that the prefill worker never wrote. `VllmAnswer` checks that the
token is the one that the client has already, and leaves it out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvmesh.protocol.errors import EngineError, InvalidRequestError, TransferError
from kvmesh.protocol.hashing import mix64
from kvmesh.protocol.messages import (
    Delta,
    FinishReason,
    GenerateRequest,
    Guide,
    GuideKind,
    PullReport,
    Ticket,
    TokenLogprob,
    unpack_tokens,
)
from kvmesh.workers.checks import check_prompt
from kvmesh.workers.choices import choices_of
from kvmesh.workers.engines.vllm.params import ASK_FOR_OFFER, read_params

_U63 = 0x7FFF_FFFF_FFFF_FFFF


# --- questions ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VllmQuestion:
    """A request in vLLM's words."""

    prompt: list[int]
    expected: tuple[int, ...]  # the answer has to begin with these tokens, which exist already
    sampling: dict[str, Any]  # fields of vLLM's SamplingParams
    guide: dict[str, Any] | None  # fields of its StructuredOutputsParams
    kv: dict[str, Any] | None  # kv_transfer_params
    offers: bool = False  # the answer has to be a ticket


def whole(request: GenerateRequest, context_tokens: int) -> VllmQuestion:
    """Return the question that computes all of the answer here. Raises InvalidRequestError."""
    tokens = _tokens(request, context_tokens)
    if request.guide is not None and request.generated:
        raise EngineError(
            "vLLM cannot continue a guided answer from its middle", hint="send the request again, from its start"
        )
    return _question(request, tokens, (), context_tokens)


def offering(request: GenerateRequest, context_tokens: int) -> VllmQuestion:
    """Return the question of a prefill leg: one token, and a ticket if the answer continues. Raises
    InvalidRequestError.
    """
    question = whole(request, context_tokens)
    if question.sampling["max_tokens"] == 1:
        return question
    sampling = question.sampling | {"max_tokens": 1, "min_tokens": min(1, question.sampling["min_tokens"])}
    return VllmQuestion(question.prompt, (), sampling, question.guide, dict(ASK_FOR_OFFER), offers=True)


def pulling(request: GenerateRequest, ticket: Ticket, block_size: int, context_tokens: int) -> VllmQuestion:
    """Return the question of a decode leg. Raises TransferError for another request's ticket, else as `whole`."""
    tokens = _tokens(request, context_tokens)
    kv = read_ticket(ticket, block_size)
    if ticket.num_tokens != len(tokens) - 1 or not request.generated:
        raise TransferError(f"the ticket is for {ticket.num_tokens} tokens, the request has {len(tokens)} and one new")
    return _question(request, tokens[:-1], (tokens[-1],), context_tokens, kv)


def unpulled(question: VllmQuestion) -> VllmQuestion:
    """Return the same question without the KV of others."""
    return VllmQuestion(question.prompt, question.expected, question.sampling, question.guide, None)


def _tokens(request: GenerateRequest, context_tokens: int) -> list[int]:
    prompt = unpack_tokens(request.prompt)
    check_prompt(len(prompt), len(request.generated), context_tokens)
    if request.stop.max_tokens <= len(request.generated):
        raise InvalidRequestError(
            f"{len(request.generated)} of at most {request.stop.max_tokens} tokens are generated already"
        )
    return [*prompt, *request.generated]


def _question(
    request: GenerateRequest,
    prompt: list[int],
    expected: tuple[int, ...],
    context_tokens: int,
    kv: dict[str, Any] | None = None,
) -> VllmQuestion:
    drawn = len(request.generated) - len(expected)  # tokens of the answer that are now part of the prompt
    max_tokens = min(request.stop.max_tokens - drawn, context_tokens - len(prompt))
    sampling = _sampling(request, drawn)
    sampling |= {"max_tokens": max_tokens, "min_tokens": max(0, min(request.stop.min_tokens - drawn, max_tokens))}
    return VllmQuestion(prompt, expected, sampling, None if request.guide is None else _guide(request.guide), kv)


def _sampling(request: GenerateRequest, drawn: int) -> dict[str, Any]:
    """All is said, so that nothing comes from the model's own defaults."""
    sampling, stop = request.sampling, request.stop
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": None if sampling.temperature == 0 else _seed(sampling.seed, drawn),
        "logprobs": sampling.top_logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "stop_token_ids": list(stop.stop_token_ids),
        "ignore_eos": stop.ignore_eos,
        "detokenize": False,
    }


def _seed(seed: int, drawn: int) -> int:
    """Return the seed for vLLM, which numbers its draws from the start of a request.

    An answer that continues here must not repeat its first draws.
    """
    return (mix64(seed + drawn) if drawn else seed) & _U63


def _guide(guide: Guide) -> dict[str, Any]:
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
            return {"choice": choices_of(guide.value)}


# --- tickets --------------------------------------------------------------------------------------------


def write_ticket(params: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return `Ticket.opaque` for a prefill engine's answer, and the tokens it is for. Raise TransferError."""
    opaque = json.dumps(params).encode()
    pull, _ = read_params(opaque)
    if not pull.remote_num_tokens:
        raise TransferError("kv_transfer_params that do not say how many tokens they are for")
    return opaque, pull.remote_num_tokens


def read_ticket(ticket: Ticket, block_size: int) -> dict[str, Any]:
    """Return the kv_transfer_params for the decode engine, with known keys only.

    Raise TransferError for what would harm the engine.
    """
    pull, _ = read_params(ticket.opaque)
    if pull.remote_num_tokens != ticket.num_tokens:
        raise TransferError(
            f"a ticket for {ticket.num_tokens} tokens offers {pull.remote_num_tokens} (remote_num_tokens)"
        )
    groups = pull.block_groups
    if len(groups) == 1:
        needed, found = -(-ticket.num_tokens // block_size), len(groups[0])
        if found != needed:
            raise TransferError(f"{ticket.num_tokens} tokens take {needed} blocks here, the ticket has {found}")
    return {**msgspec.to_builtins(pull), "remote_block_ids": groups}


# --- answers --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VllmStep:
    """The part that vLLM adds to one answer; plain values of its RequestOutput."""

    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[Mapping[int, Any]] | None = None  # per token: id -> object with logprob and rank
    cached_tokens: int | None = None  # with a ticket: those that the prefill worker had cached
    pulled_tokens: int | None = None  # of the prompt, from another worker; None: not known
    kv: Mapping[str, Any] | None = None
    prompt_logprobs: Sequence[Mapping[int, Any] | None] = ()  # per token of the prompt, with the first token


class PullFailedError(Exception):
    """Raised if vLLM could not fetch the KV; nothing of the answer was given yet."""


class DivergedError(Exception):
    """The first token is not the one that the prefill worker drew, though the seed is the same."""


@dataclass(slots=True)
class VllmAnswer:
    """Turns the steps of one question into deltas."""

    question: VllmQuestion
    eos_token_ids: frozenset[int]
    report: PullReport | None = None  # of a decode leg, for its first delta
    _expected: list[int] = field(init=False)
    _has_begun: bool = False

    def __post_init__(self) -> None:
        self._expected = list(self.question.expected)

    def take(self, step: VllmStep) -> Delta | None:
        """Return the delta for a step, None if it adds nothing. Raise PullFailedError, DivergedError, EngineError."""
        if step.finish_reason not in (None, "stop", "length"):
            if self.question.kv is not None and not self.question.offers and not self._has_begun:
                raise PullFailedError(f"vLLM ended it with {step.finish_reason!r}")
            raise EngineError(f"vLLM gave the request up with {step.finish_reason!r}", hint="see the worker's log")
        known = self._skip(step.token_ids)
        token_ids = tuple(step.token_ids[known:])
        if not token_ids and step.finish_reason is None:
            return None
        finish = None if step.finish_reason is None else FinishReason(step.finish_reason)
        if self.question.offers and finish is FinishReason.LENGTH:
            finish = None  # it continues on another worker
        delta = Delta(
            token_ids=token_ids,
            finish_reason=finish,
            logprobs=self._logprobs(step, known),
            cached_tokens=None if self._has_begun else step.cached_tokens,
            pull=None if self._has_begun else self.report,
            stop_token=self._stop_token(step, token_ids) if finish is FinishReason.STOP else None,
        )
        self._has_begun = True
        return delta

    def _skip(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens exist already."""
        known = min(len(self._expected), len(token_ids))
        if list(token_ids[:known]) != self._expected[:known]:
            raise DivergedError
        del self._expected[:known]
        return known

    def _logprobs(self, step: VllmStep, known: int) -> tuple[TokenLogprob, ...] | None:
        count = self.question.sampling["logprobs"]
        if count is None or step.logprobs is None or known == len(step.token_ids):
            return None
        pairs = zip(step.token_ids[known:], step.logprobs[known:], strict=True)
        told = tuple(_logprob(token_id, at_token, count) for token_id, at_token in pairs)
        return self._prompt_logprobs(step) + told if step.prompt_logprobs else told

    def _prompt_logprobs(self, step: VllmStep) -> tuple[TokenLogprob, ...]:
        """Return the logprobs of the prompt's tokens. vLLM gives None for the first one."""
        count, prompt = self.question.sampling["prompt_logprobs"], self.question.prompt
        pairs = zip(prompt[1:], step.prompt_logprobs[1:], strict=True)
        return tuple(_logprob(token_id, at_token, count) for token_id, at_token in pairs if at_token is not None)

    def _stop_token(self, step: VllmStep, token_ids: Sequence[int]) -> int | None:
        if isinstance(step.stop_reason, int):
            return step.stop_reason
        return token_ids[-1] if token_ids and token_ids[-1] in self.eos_token_ids else None


def _logprob(token_id: int, at_token: Mapping[int, Any], count: int) -> TokenLogprob:
    """Return the logprob of a token. vLLM gives the likeliest tokens and the chosen one, wherever that stands."""
    ranked = sorted((entry.rank, other, entry.logprob) for other, entry in at_token.items())
    top = tuple((other, logprob) for rank, other, logprob in ranked if rank <= count)
    return TokenLogprob(token_id, at_token[token_id].logprob, top)
