"""One worker or two? Pure. The reasons stand in docs/routing.md, "Aggregate or disaggregate"."""

from dataclasses import dataclass

from msgspec import Struct


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    """A decode worker computes the prompt itself when little of it is left to compute.

    Both must hold: fewer than `max_tokens` uncached tokens, and less than `max_share` of the prompt. Then a
    prefill worker would recompute, or hold, what the decode worker has, and the hand-over costs more than the
    interference with its other streams.
    """

    max_tokens: int = 2048
    max_share: float = 0.7


class Backlog(Struct, frozen=True):
    """Prompt tokens that would be computed until this request's are: on the best prefill worker, and on the decode
    worker that would do all by itself; half as many where it is twice as fast. `is_full`: that prefill worker should be
    given nothing more now."""

    prefill_tokens: float = 0.0
    local_tokens: float = 0.0
    is_full: bool = False


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
    """`cached_tokens`: what the decode worker that would do it alone holds. `wish`: what the caller asked for."""
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
        return Decision(False, f"prefill workers are the bottleneck: {until_done}")
    return Decision(True, f"{uncached} of {isl_tokens} prompt tokens are to compute")
