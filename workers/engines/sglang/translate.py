"""Our requests as arguments of SGLang's `Engine.async_generate`, and what it yields as deltas. Pure.

Shapes are those of SGLang 0.5.23: entrypoints/engine.py, managers/tokenizer_manager.py, sampling/sampling_params.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.protocol.errors import (
    EngineError,
    InvalidRequestError,
    MeshError,
    OverloadedError,
)
from kvmesh.protocol.messages import (
    Delta,
    FinishReason,
    GenerateRequest,
    Guide,
    GuideKind,
    TokenLogprob,
    unpack_tokens,
)
from kvmesh.workers.checks import check_prompt
from kvmesh.workers.choices import choice_regex
from kvmesh.workers.engines.sglang.bootstrap import Bootstrap

_I63 = (1 << 63) - 1
_MAX_PENALTY = 2.0


def generate_kwargs(
    request: GenerateRequest,
    *,
    context_tokens: int,
    has_tokenizer: bool,
    adapter: str | None = None,
    bootstrap: Bootstrap | None = None,
) -> dict[str, Any]:
    """Return all arguments but the `rid`. `adapter` is SGLang's name of the request's adapter.

    Raises InvalidRequestError for a parameter that SGLang would not honour.
    """
    prompt = unpack_tokens(request.prompt)
    check_prompt(len(prompt), len(request.generated), context_tokens)
    kwargs: dict[str, Any] = {
        "input_ids": [*prompt, *request.generated],
        "sampling_params": _sampling_params(request, has_tokenizer=has_tokenizer),
        "stream": True,
    }
    if request.sampling.top_logprobs is not None:
        kwargs |= {
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": request.sampling.top_logprobs,
        }
    if adapter is not None:
        kwargs["lora_path"] = adapter
    if request.cache_salt is not None:
        kwargs["cache_salt"] = request.cache_salt
    return kwargs if bootstrap is None else kwargs | bootstrap.kwargs


def _sampling_params(request: GenerateRequest, *, has_tokenizer: bool) -> dict[str, Any]:
    """Tokens generated before count against the limits: they are part of the prompt here."""
    sampling, stop = request.sampling, request.stop
    done = len(request.generated)
    _check_penalties(request)
    params: dict[str, Any] = {
        "max_new_tokens": max(1, stop.max_tokens - done),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "sampling_seed": sampling.seed & _I63,
        "stop_token_ids": list(stop.stop_token_ids),
        "ignore_eos": stop.ignore_eos,
    }
    if (min_tokens := stop.min_tokens - done) > 0:
        if not has_tokenizer:  # the scheduler would fall over it, with all it runs
            raise InvalidRequestError(
                "this worker's engine cannot honour min_tokens without a tokenizer",
                hint="start it with -- --grammar-backend xgrammar",
                param="min_tokens",
            )
        params["min_new_tokens"] = min(min_tokens, params["max_new_tokens"])
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if request.guide is not None:
        params |= guide_params(request.guide)
    return params


def _check_penalties(request: GenerateRequest) -> None:
    sampling = request.sampling
    for name in ("presence_penalty", "frequency_penalty"):
        value: float = getattr(sampling, name)
        if not -_MAX_PENALTY <= value <= _MAX_PENALTY:
            raise InvalidRequestError(f"{name} is {value}, SGLang takes -2 to 2", param=name)
    if not 0 < sampling.repetition_penalty <= _MAX_PENALTY:
        raise InvalidRequestError(
            f"repetition_penalty is {sampling.repetition_penalty}, SGLang takes more than 0 and at most 2",
            param="repetition_penalty",
        )


def guide_params(guide: Guide) -> dict[str, str]:
    match guide.kind:
        case GuideKind.JSON:
            return {"json_schema": '{"type": "object"}'}
        case GuideKind.JSON_SCHEMA:
            return {"json_schema": guide.value}
        case GuideKind.REGEX:
            return {"regex": guide.value}
        case GuideKind.GRAMMAR:
            return {"ebnf": guide.value}
        case GuideKind.CHOICE:
            return {"regex": choice_regex(guide.value)}


class SglangAnswer:
    """Reads one stream of outputs, in order.

    An output has `output_ids` and `meta_info`. With --incremental-streaming-output the ids and the logprobs are the new
    ones. Without it they are all so far, and the list may be one that SGLang continues to write to.
    """

    def __init__(self, *, is_incremental: bool, top_logprobs: int | None) -> None:
        self.has_ended = False
        self._is_incremental = is_incremental
        self._top_logprobs = top_logprobs
        self._sent_tokens = 0
        self._is_first = True

    def on_output(self, output: Mapping[str, Any]) -> Delta | None:
        """Return what is new, None if nothing is. Raise what ended the answer in place of a finish reason."""
        meta: Mapping[str, Any] = output["meta_info"]
        finish = meta.get("finish_reason")
        if isinstance(finish, Mapping) and finish.get("type") == "abort":
            self.has_ended = True  # its output_ids repeat tokens that were sent
            raise _abort_error(finish)
        tokens = self._new(output.get("output_ids") or ())
        reason = _finish_reason(finish)
        self.has_ended = reason is not None
        if not tokens and reason is None:
            return None
        delta = Delta(
            token_ids=tokens,
            finish_reason=reason,
            logprobs=self._logprobs(meta, len(tokens)),
            cached_tokens=_cached(meta) if self._is_first else None,
            stop_token=_stop_token(finish, tokens),
        )
        self._sent_tokens += len(tokens)
        self._is_first = False
        return delta

    def _new(self, ids: Sequence[Any]) -> tuple[int, ...]:
        return tuple(ids) if self._is_incremental else tuple(ids[self._sent_tokens :])

    def _logprobs(self, meta: Mapping[str, Any], num_tokens: int) -> tuple[TokenLogprob, ...] | None:
        """Return the logprobs of the new tokens.

        `output_token_logprobs` has one (logprob, token id, text) per token, `output_top_logprobs` a list of those.
        """
        if self._top_logprobs is None:
            return None
        start = 0 if self._is_incremental else self._sent_tokens
        chosen = (meta.get("output_token_logprobs") or ())[start : start + num_tokens]
        if len(chosen) != num_tokens:
            raise EngineError(f"SGLang gave {len(chosen)} logprobs for {num_tokens} tokens")
        tops = (meta.get("output_top_logprobs") or ())[start : start + num_tokens]
        tops = [*tops, *[None] * (num_tokens - len(tops))]
        return tuple(
            TokenLogprob(token, logprob, _top(top, self._top_logprobs))
            for (logprob, token, *_), top in zip(chosen, tops, strict=True)
        )


def _top(entries: Sequence[Sequence[Any]] | None, wanted: int) -> tuple[tuple[int, float], ...]:
    ranked = sorted(entries or (), key=lambda entry: -entry[0])
    return tuple((token, logprob) for logprob, token, *_ in ranked[:wanted])


def _finish_reason(finish: object) -> FinishReason | None:
    if finish is None:
        return None
    kind = finish.get("type") if isinstance(finish, Mapping) else finish
    match kind:
        case "stop":
            return FinishReason.STOP
        case "length":
            return FinishReason.LENGTH
    raise EngineError(f"SGLang ended an answer for an unknown reason: {kind!r}")


def _stop_token(finish: object, tokens: Sequence[int]) -> int | None:
    if not isinstance(finish, Mapping) or finish.get("type") != "stop" or not tokens:
        return None
    matched = finish.get("matched")
    last = matched[-1] if isinstance(matched, list) and matched else matched
    return tokens[-1] if isinstance(last, int) and last == tokens[-1] else None


def _cached(meta: Mapping[str, Any]) -> int | None:
    cached = meta.get("cached_tokens")
    return cached if isinstance(cached, int) else None


def _abort_error(finish: Mapping[str, Any]) -> MeshError:
    said = str(finish.get("message") or "aborted")[:500]
    match finish.get("status_code"):
        case 400:
            return InvalidRequestError(f"SGLang refused the request: {said}")
        case 429 | 503:
            return OverloadedError(f"SGLang is full: {said}")
    return EngineError(f"SGLang gave the request up: {said}")
