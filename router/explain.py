"""Why a request runs where it does: the reasons of a decision as plain data. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from protocol.messages import CandidateReport, Explanation
from router.index import Holder
from router.selection import Candidate, Policy, Prompt, Terms

MAX_CANDIDATES = 64  # told of, for each leg


class Leg(Struct):
    """One choice: which of the candidates, and by what."""

    name: str  # "whole", "prefill" or "decode"
    chosen: Candidate
    is_full: bool
    why: str  # "": by the policy
    prompt: Prompt
    candidates: Sequence[Candidate]
    passed_over: Mapping[Holder, str]  # those that the policy was not asked about, and why


@dataclass(frozen=True, slots=True)
class Reasons:
    policy: Policy
    temperature: float
    reason: str  # why one worker, or two
    recompute_price: float
    busy_share: float
    asked_before: float
    waited_s: float
    legs: Sequence[Leg]


_WHYS: Mapping[Policy, str] = {
    "least-loaded": "the least loaded",
    "power-of-two": "the less loaded of two that were drawn",
    "round-robin": "whose turn it is",
    "random": "drawn",
}


def explain(reasons: Reasons, name_of: Callable[[Holder], str]) -> Explanation:
    reports = [report for leg in reasons.legs for report in _reports(leg, name_of)]
    whys = [f"{leg.name}: {name_of(leg.chosen.holder)}, {leg.why or _why(leg, reasons)}" for leg in reasons.legs]
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
    """The chosen one is told of in any case."""
    costed = sorted(((leg.prompt.cost(c), c) for c in leg.candidates), key=lambda pair: (pair[0], pair[1].holder))
    told = costed[:MAX_CANDIDATES]
    if all(c is not leg.chosen for _, c in told):
        told[-1] = (leg.prompt.cost(leg.chosen), leg.chosen)
    return [_report(leg, c, cost, name_of(c.holder)) for cost, c in told]


def _report(leg: Leg, c: Candidate, cost: float, name: str) -> CandidateReport:
    terms = Terms(*leg.prompt.terms(c))
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
        terms={term: round(value, 3) for term, value in terms._asdict().items() if value},
        note="chosen" if c is leg.chosen else leg.passed_over.get(c.holder, ""),
    )


def _why(leg: Leg, reasons: Reasons) -> str:
    rivals = [c for c in leg.candidates if c is not leg.chosen and c.holder not in leg.passed_over]
    if not rivals:
        return "the only one that may take it now" if leg.passed_over else "the only one that may take it"
    if reasons.policy != "kv":
        return _WHYS[reasons.policy]
    cost, next_cost = leg.prompt.cost(leg.chosen), min(leg.prompt.cost(c) for c in rivals)
    if reasons.temperature > 0:
        return f"cost {cost:.1f}, drawn; the others cost {next_cost:.1f} and more"
    if cost == next_cost:
        return f"of equal cost ({cost:.1f}), chosen longest ago"
    return f"cost {cost:.1f}, the next {next_cost:.1f}"
