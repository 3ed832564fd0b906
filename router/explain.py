"""Explain why a request runs where it does: the reasons of a plan as plain data. Pure."""

from kvmesh.protocol.messages import CandidateReport, Explanation
from kvmesh.router.placing import LegChoice, PlacementPlan, RequestView
from kvmesh.router.policies import POLICIES
from kvmesh.router.selection import Candidate, Terms

MAX_CANDIDATES = 64  # reported, for each leg


def explain(plan: PlacementPlan, waited_s: float = 0.0) -> Explanation:
    """Return the reasons of a plan. The chosen candidate is reported even where not all are."""
    view = plan.view
    return Explanation(
        policy=view.rules.policy,
        why="; ".join([plan.reason, *(_why_this(leg, view) for leg in plan.legs), *_not_paired(plan)]),
        recompute_price=round(view.price, 3),
        busy_share=round(view.busy_share, 3),
        asked_before=round(view.asked_before, 2),
        waited_s=round(waited_s, 6),
        candidates=tuple([report for leg in plan.legs for report in _reports(leg, view)]),
    )


def _not_paired(plan: PlacementPlan) -> list[str]:
    return [str(plan.apart)] if plan.apart is not None and len(plan.legs) > 1 else []


def _name(c: Candidate, view: RequestView) -> str:
    return view.fleet.slots[c.holder].card.name


def _why_this(leg: LegChoice, view: RequestView) -> str:
    text = f"{leg.kind}: {_name(leg.chosen, view)}, {leg.why or _why(leg, view)}"
    if (pull := leg.chosen.pull) is None:
        return text
    return f"{text}, pulls up to {pull.blocks} blocks from {view.fleet.slots[pull.source].card.name}"


def _reports(leg: LegChoice, view: RequestView) -> list[CandidateReport]:
    costed = sorted(((leg.cost.cost(c), c) for c in leg.candidates), key=lambda pair: (pair[0], pair[1].holder))
    reported = costed[:MAX_CANDIDATES]
    if all(c is not leg.chosen for _, c in reported):
        reported[-1] = (leg.cost.cost(leg.chosen), leg.chosen)
    return [_report(leg, c, cost, view) for cost, c in reported]


def _report(leg: LegChoice, c: Candidate, cost: float, view: RequestView) -> CandidateReport:
    terms = Terms(*leg.cost.terms(c))
    unbooked = view.fleet.load.of(c.holder).unbooked
    return CandidateReport(
        leg=leg.kind,
        worker=_name(c, view),
        dp_rank=c.holder.dp_rank,
        overlap_blocks=c.overlap,
        queued_tokens=int(c.queued_tokens),
        held_blocks=int(c.held_blocks),
        requests=c.requests,
        capacity=c.capacity,
        cost=round(cost, 3),
        terms={term: round(value, 3) for term, value in terms._asdict().items() if value},
        note="chosen" if c is leg.chosen else leg.passed_over.get(c.holder, ""),
        unbooked_tokens=int(unbooked.queued_tokens),
        unbooked_blocks=unbooked.held_blocks,
        unbooked_requests=unbooked.requests,
    )


def _why(leg: LegChoice, view: RequestView) -> str:
    rivals = [c for c in leg.candidates if c is not leg.chosen and c.holder not in leg.passed_over]
    policy = POLICIES[view.rules.policy]
    if not rivals:
        return "the only one that may take it now" if leg.passed_over else "the only one that may take it"
    if not policy.by_cost:
        return policy.why
    cost, next_cost = leg.cost.cost(leg.chosen), min(leg.cost.costs(rivals))
    if view.rules.temperature > 0:
        return f"cost {cost:.1f}, drawn; the others cost {next_cost:.1f} and more"
    if cost == next_cost:
        return f"of equal cost ({cost:.1f}), chosen longest ago"
    return f"cost {cost:.1f}, the next {next_cost:.1f}"
