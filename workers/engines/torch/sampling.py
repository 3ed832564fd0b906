"""Choose tokens from logits. Pure: equal logits, settings and tokens so far give equal choices, on any worker.

The semantics are vLLM's: penalties, then biases, then what may not be chosen at all, then temperature, then min_p,
top_k and top_p; logprobs are those of the model itself, before any of these.
"""

from collections.abc import Callable, Iterable, Sequence
from struct import Struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from kvmesh.protocol.messages import SamplingParams, TokenLogprob
from kvmesh.workers.executor import Row, Sampled

_GREEDY_BELOW = 1e-5  # a smaller temperature overflows, and means greedy anyhow
_PAIR = Struct("<QQ")
_U64 = 0xFFFF_FFFF_FFFF_FFFF


def choose(logits: Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """Choose one token per row. logits: float32 [S, vocab], row for row those of `rows`; left as they are."""
    adjusted = adjust(logits, rows)
    token_ids: list[int] = adjusted.argmax(-1).tolist()
    random = [i for i, row in enumerate(rows) if not is_greedy(row.sampling)]
    if random:
        drawn = draw(
            adjusted if len(random) == len(rows) else adjusted[random],
            [rows[i].sampling for i in random],
            [uniform(rows[i].sampling.seed, len(rows[i].output)) for i in random],
        )
        for i, token_id in zip(random, drawn, strict=True):
            token_ids[i] = token_id
    logprobs = token_logprobs(logits, token_ids, [row.sampling.top_logprobs for row in rows])
    return [Sampled(token_id, logprob) for token_id, logprob in zip(token_ids, logprobs, strict=True)]


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _GREEDY_BELOW


def uniform(seed: int, index: int) -> float:
    """The draw for token `index` of an answer: in [0, 1), a function of these two numbers alone."""
    digest = xxh3_64_intdigest(_PAIR.pack(seed & _U64, index))
    return (digest >> 11) * 2.0**-53  # the bits a float can hold: / 2^64 would round some draws up to 1


def adjust(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Apply penalties, biases and bans: a new tensor, or `logits` itself where no row has any. [S, vocab]"""
    touched = [(i, row) for i, row in enumerate(rows) if is_ruled(row) or has_penalties(row.sampling)]
    if not touched:
        return logits
    adjusted = logits.clone()
    for i, row in touched:
        penalize(adjusted[i], row.sampling, row.prompt, row.output)
        bias(adjusted[i], row.sampling)
        if (open_to := choosable(row, logits.shape[-1])) is not None:
            adjusted[i].masked_fill_(torch.from_numpy(~open_to).to(logits.device), float("-inf"))
    return adjusted


def is_ruled(row: Row) -> bool:
    sampling = row.sampling
    return bool(row.banned or sampling.logit_bias or sampling.allowed_token_ids or row.guide is not None)


def bias(logits: Tensor, params: SamplingParams) -> None:
    """Change `logits` [vocab] in place."""
    if params.logit_bias:
        biases = dict(params.logit_bias)
        token_ids = torch.tensor(list(biases), device=logits.device)
        logits[token_ids] += torch.tensor(list(biases.values()), dtype=logits.dtype, device=logits.device)


def choosable(row: Row, vocab_size: int) -> NDArray[np.bool_] | None:
    """The tokens that may be chosen, bool [vocab], at least one; None: all.

    The guide counts most, then the allowed tokens, then the bans: what would leave nothing is passed over.
    """
    rules: list[NDArray[np.bool_]] = []
    if row.guide is not None and (allowed := row.guide.allowed()) is not None:
        rules.append(allowed)
    if row.sampling.allowed_token_ids:
        rules.append(_mark(row.sampling.allowed_token_ids, vocab_size))
    if row.banned:
        rules.append(~_mark(row.banned, vocab_size))
    left: NDArray[np.bool_] | None = None
    for rule in rules:
        narrowed = rule if left is None else left & rule
        if narrowed.any():
            left = narrowed
    return left


def _mark(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.bool_]:
    """Return bool [vocab], True for `ids`. Ids that the model does not have are left out."""
    ids = np.array(token_ids, np.int64)
    marked = np.zeros(vocab_size, np.bool_)
    marked[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return marked


def has_penalties(params: SamplingParams) -> bool:
    return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)


def penalize(logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Change `logits` [vocab] in place: repetition looks at prompt and output, the others at the output."""
    if params.repetition_penalty != 1.0:
        seen, _ = _count([*prompt, *output], logits)
        value = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(value > 0, value / factor, value * factor)
    if params.presence_penalty or params.frequency_penalty:
        seen, counts = _count(output, logits)
        logits[seen] -= params.frequency_penalty * counts + params.presence_penalty


def _count(token_ids: Sequence[int], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids and how often each occurs, both int64 [n]; ids that the model does not have are left out."""
    ids, counts = np.unique(np.array(token_ids, np.int64), return_counts=True)
    known = (ids >= 0) & (ids < logits.shape[-1])
    return torch.from_numpy(ids[known]).to(logits.device), torch.from_numpy(counts[known]).to(logits.device)


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """Draw one token per row of `logits` [R, vocab] by inverting the cumulative distribution at `uniforms`.

    Tokens stand in falling order of probability, equal ones by id. Each filter keeps a prefix of that order,
    so filtering is finding where to cut.
    """

    def column(of: Callable[[SamplingParams], float]) -> Tensor:
        return torch.tensor([[of(p)] for p in params], dtype=torch.float64, device=logits.device)

    # The maximum is taken off before the division, which a small temperature would overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)) / column(lambda p: p.temperature).float()
    ordered, ids = in_falling_order(scaled)
    probs = ordered.softmax(-1)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    kept = count_kept(probs, cumulative, params, column)
    mass = cumulative.gather(-1, kept - 1)
    target = mass * torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None]
    # As uniforms are below 1 by a float's precision, targets are below the mass: the first token beyond the
    # target is a kept one with a probability. Only after NaN logits the search runs past the end.
    place = torch.searchsorted(cumulative, target, right=True).minimum(kept - 1)
    chosen: list[int] = ids.gather(-1, place).squeeze(-1).tolist()
    return chosen


def count_kept(
    probs: Tensor,
    cumulative: Tensor,
    params: Sequence[SamplingParams],
    column: Callable[[Callable[[SamplingParams], float]], Tensor],
) -> Tensor:
    """Return how many of the likeliest tokens pass min_p, top_k and top_p: int64 [R, 1], at least 1.

    probs, cumulative: [R, vocab] in falling order. top_p is a share of what min_p and top_k leave.
    """
    vocab_size = probs.shape[-1]
    kept = column(lambda p: p.top_k if 0 < p.top_k < vocab_size else vocab_size).long()
    if any(p.min_p > 0 for p in params):
        floor = probs[:, :1] * column(lambda p: p.min_p)
        kept = kept.minimum((probs >= floor).sum(-1, keepdim=True).clamp(min=1))
    if any(p.top_p < 1 for p in params):
        # The smallest prefix that reaches the share; 1 is no filter, whatever the sums round to.
        share = column(lambda p: p.top_p if p.top_p < 1 else 2.0) * cumulative.gather(-1, kept - 1)
        kept = kept.minimum(torch.searchsorted(cumulative, share) + 1)
    return kept


def in_falling_order(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each row of float32 [R, V], equal values by index: values [R, V], indices int64 [R, V]."""
    if values.device.type != "cpu":
        ordered, indices = values.sort(dim=-1, descending=True, stable=True)
        return ordered, indices
    # torch's stable sort takes 15 times as long on a CPU as numpy's sort of (value, index) in one integer.
    bits: NDArray[np.int64] = (values + 0.0).numpy().view(np.int32).astype(np.int64)  # + 0.0: no -0.0
    rising = bits ^ ((bits >> 63) & 0x7FFF_FFFF)  # integers that rise with the floats
    keys = (~rising << 32) | np.arange(values.shape[-1])
    keys.sort(axis=-1)
    indices = torch.from_numpy(keys & 0xFFFF_FFFF)
    return values.gather(-1, indices), indices


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], top: Sequence[int | None]
) -> Iterable[TokenLogprob | None]:
    """Logprobs of the chosen tokens [S] and the likeliest ones, where `top` [S] is not None."""
    result: list[TokenLogprob | None] = [None] * len(token_ids)
    asked = [i for i, count in enumerate(top) if count is not None]
    if not asked:
        return result
    found = logprobs_of(logits[asked], [token_ids[i] for i in asked], [top[i] or 0 for i in asked])
    for i, logprob in zip(asked, found, strict=True):
        result[i] = logprob
    return result


def logprobs_of(logits: Tensor, token_ids: Sequence[int], top: Sequence[int]) -> list[TokenLogprob]:
    """Return the logprob of one token for each row of `logits` [R, vocab], and those of the `top` [R] likeliest."""
    logprobs = logits.log_softmax(-1)
    these = torch.tensor(token_ids, device=logits.device)[:, None]
    values = logprobs.gather(-1, these).squeeze(-1).tolist()
    most = min(max(top), logits.shape[-1])
    top_values, top_ids = (part.tolist() for part in logprobs.topk(most, dim=-1))
    return [
        TokenLogprob(token_id, value, tuple(zip(ids[:count], likeliest[:count], strict=True)))
        for token_id, value, count, ids, likeliest in zip(token_ids, values, top, top_ids, top_values, strict=True)
    ]
