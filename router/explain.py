"""Why a request runs where it does: the reasons of a decision as plain data. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.messages import CandidateReport, Explanation
from router.index import Holder
from router.selection import Candidate, Prompt

MAX_CANDIDATES = 64  # told of, for each leg


@dataclass(slots=True)
class Leg:
    """One choice: which of the candidates, and by what."""

    name: str  # "whole", "prefill" or "decode"
    chosen: Candidate
    cost: float
    is_full: bool
    why: str  # "": by the policy
    prompt: Prompt
    candidates: Sequence[Candidate]
    held_back: frozenset[Holder]


@dataclass(frozen=True, slots=True)
class Reasons:
    policy: str
    reason: str  # why one worker, or two
    recompute_price: float
    busy_share: float
    asked_before: float
    waited_s: float
    legs: Sequence[Leg]


def explain(reasons: Reasons, name_of: Callable[[Holder], str]) -> Explanation:
    reports = [report for leg in reasons.legs for report in _reports(leg, name_of)]
    whys = [f"{leg.name}: {name_of(leg.chosen.holder)}, {leg.why or _why(leg)}" for leg in reasons.legs]
    return Explanation(
        policy=reasons.policy,
        why="; ".join([reasons.reason, *whys]),
        recompute_price=round(reasons.recompute_price, 3),
        busy_share=round(reasons.busy_share, 3),
        asked_before=round(reasons.asked_before, 2),
        waited_s=round(reasons.waited_s, 6),
        candidates=tuple(reports),
    )


def _reports(leg: Leg, name_of: Callable[[Holder], str]) -> list[CandidateReport]:
    costed = sorted(((leg.prompt.cost(c), c) for c in leg.candidates), key=lambda pair: (pair[0], pair[1].holder))
    return [_report(leg, c, cost, name_of(c.holder)) for cost, c in costed[:MAX_CANDIDATES]]


def _report(leg: Leg, c: Candidate, cost: float, name: str) -> CandidateReport:
    note = "chosen" if c is leg.chosen else "new: held back" if c.holder in leg.held_back else ""
    return CandidateReport(
        leg=leg.name,
        worker=name,
        dp_rank=c.holder.dp_rank,
        overlap_blocks=c.overlap,
        queued_tokens=int(c.queued_tokens),
        held_blocks=int(c.held_blocks),
        requests=c.requests,
        capacity=c.capacity,
        cost=round(cost, 3),
        terms={term: round(value, 3) for term, value in leg.prompt.terms(c)._asdict().items() if value},
        note=note,
    )


def _why(leg: Leg) -> str:
    if len(leg.candidates) == 1:
        return "the only one that may take it"
    others = [leg.prompt.cost(c) for c in leg.candidates if c is not leg.chosen]
    cheapest = min(others)
    if leg.cost == cheapest:
        return f"of equal cost ({leg.cost:.1f}), chosen longest ago"
    if leg.cost > cheapest:
        return f"cost {leg.cost:.1f}, the cheapest {cheapest:.1f}: the policy does not go by cost alone"
    return f"cost {leg.cost:.1f}, the next {cheapest:.1f}"
