"""Decide whether one worker or two serve a request. Pure. Reasons: docs/routing.md, "Aggregate or disaggregate"."""

from dataclasses import dataclass

from msgspec import Struct


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    """The limits below which a decode worker computes the rest of a prompt itself.

    Both must hold: fewer than `max_tokens` uncached tokens, and less than `max_share` of the prompt. Then a prefill
    worker would recompute, or hold, what the decode worker has already. The hand-over would cost more than the
    interference with the worker's other streams.
    """

    max_tokens: int = 2048
    max_share: float = 0.7


class Backlog(Struct, frozen=True):
    """Prompt tokens to compute until this request's are: on the best prefill worker, and on the decode worker alone.

    Both are divided by the worker's capacity. `is_full`: that prefill worker is given no more requests now.
    `spare_share`: of the decode worker's time, for more prompts; at or below 0 its answers would be too slow.
    """

    prefill_tokens: float = 0.0
    local_tokens: float = 0.0
    is_full: bool = False
    spare_share: float = 1.0


class Decision(Struct, frozen=True):
    disaggregate: bool
    reason: str


def decide(
    isl_tokens: int,
    cached_tokens: int,
    prefill_ready: bool,
    wish: bool | None,
    rule: LocalPrefill,
    backlog: Backlog | None = None,
) -> Decision:
    """Decide between one worker and two, with the reason.

    cached_tokens: of the prompt, on the decode worker that would serve the request alone. wish: of the caller. Where
    prefill workers are the bottleneck, the decode worker computes the prompt if its answers can bear it; if not, the
    request is for two workers and waits for a prefill worker.
    """
    if not prefill_ready:
        return Decision(False, "no prefill worker is ready")
    if wish is not None:
        return Decision(wish, "asked for by the caller")
    uncached = max(0, isl_tokens - cached_tokens)
    if uncached < rule.max_tokens and uncached < rule.max_share * isl_tokens:
        return Decision(False, f"only {uncached} of {isl_tokens} prompt tokens are not cached on the decode worker")
    if backlog is not None and backlog.is_full and backlog.local_tokens < backlog.prefill_tokens:
        until_done = (
            f"{backlog.prefill_tokens:.0f} tokens to compute there until it is done, {backlog.local_tokens:.0f} here"
        )
        if backlog.spare_share > 0:
            return Decision(False, f"prefill workers are the bottleneck: {until_done}")
        return Decision(True, f"answers on the decode worker need its time, though {until_done}")
    return Decision(True, f"{uncached} of {isl_tokens} prompt tokens are to compute")
