"""Measure what faults cost requests. Pure.

A request is hit by a fault if both were there at one time (the fault's time ends when its target has settled) and the
request has used the target: its frontend, its last prefill or decode worker, any worker if it migrated, or something
that all requests use: discovery, NATS, the disk, a router. The time that the fault cost it is its longest wait, for the
first token or between two tokens, less what requests of its shape wait at most while there is no fault. From that goes
the time in which nothing could have answered: its own frontend was stopped, or the fault itself makes its target slow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.lab.faults.kinds import FRONTEND, HOST, KINDS, ROUTER, SHARED
from kvmesh.lab.faults.oracle import Answered
from kvmesh.lab.faults.schedule import PlannedFault

DYING_S = 0.5  # in which the kernel still takes connections for a process that was killed


@dataclass(frozen=True, slots=True)
class Happened:
    """A fault as it was carried out. Times are seconds since the run began."""

    fault: PlannedFault
    began_s: float
    ended_s: float
    note: str = ""

    @property
    def settled_s(self) -> float:
        return self.ended_s + KINDS[self.fault.kind].settles_s


@dataclass(frozen=True, slots=True)
class Recovery:
    """Hold what faults cost one request."""

    answered: Answered
    cost_s: float
    hits: tuple[Happened, ...]


def hits_of(answered: Answered, happened: Sequence[Happened]) -> tuple[Happened, ...]:
    return tuple(
        one
        for one in happened
        if one.began_s < answered.ended_s and answered.sent_s < one.settled_s and _uses(answered, one.fault)
    )


def _uses(answered: Answered, fault: PlannedFault) -> bool:
    if fault.role == HOST:
        return False  # it happens beside the mesh
    if fault.role in SHARED or fault.role == ROUTER:
        return True
    if fault.role == FRONTEND:
        return fault.kind == "rolling" or fault.index == answered.frontend
    trace = answered.trace
    if trace.get("migrations") or not trace:
        return True
    used = {trace.get("prefill_worker"), trace.get("decode_worker")}
    return fault.target in used or (fault.kind == "rolling" and any(str(n).startswith(fault.role) for n in used))


def recovery_of(answered: Answered, happened: Sequence[Happened], usual_s: float) -> Recovery | None:
    """Return what the faults cost a request, None if none has hit it. `usual_s`: the longest wait without a fault."""
    hits = hits_of(answered, happened)
    if not hits:
        return None
    begins_s, ends_s = answered.wait
    lost_s = sum(_overlap_s(begins_s, ends_s, one) for one in hits if _is_unavoidable(answered, one.fault))
    return Recovery(answered, max(0.0, ends_s - begins_s - usual_s - lost_s), hits)


def _is_unavoidable(answered: Answered, fault: PlannedFault) -> bool:
    """Return whether nothing could have answered meanwhile, or only slowly."""
    if fault.role == FRONTEND:
        return fault.kind == "stop"
    used = (answered.trace.get("prefill_worker"), answered.trace.get("decode_worker"))
    return KINDS[fault.kind].slows and (fault.target in used or fault.role == ROUTER)


def _overlap_s(begins_s: float, ends_s: float, one: Happened) -> float:
    return max(0.0, min(ends_s, one.ended_s) - max(begins_s, one.began_s))


def usual_waits(answers: Sequence[Answered], happened: Sequence[Happened]) -> Mapping[str, float]:
    """Return the longest wait of each shape among the requests during which there was no fault at all."""
    longest: dict[str, float] = {}
    for answered in answers:
        if any(one.began_s < answered.ended_s and answered.sent_s < one.settled_s for one in happened):
            continue
        begins_s, ends_s = answered.wait
        longest[answered.ask.shape] = max(longest.get(answered.ask.shape, 0.0), ends_s - begins_s)
    return longest


def is_excused(answered: Answered, happened: Sequence[Happened]) -> bool:
    """Return whether the client lost its connection because the process at its other end was killed."""
    return bool(answered.broken) and any(
        one.fault.kind == "kill"
        and one.fault.target == f"frontend-{answered.frontend}"
        and answered.sent_s - DYING_S <= one.began_s <= answered.ended_s + DYING_S
        for one in happened
    )


def stopped_s(answered: Answered, happened: Sequence[Happened]) -> float:
    """Return how long the frontend of a request was stopped during the request."""
    stops = [
        one for one in happened if one.fault.kind == "stop" and one.fault.target == f"frontend-{answered.frontend}"
    ]
    return sum(_overlap_s(answered.sent_s, answered.ended_s, one) for one in stops)


def percentile(costs_s: Sequence[float], share: float) -> float:
    """Return the nearest rank: of 100 values and 0.99 the 99th. 0.0 of none."""
    ranked = sorted(costs_s)
    return ranked[max(0, -(-len(ranked) * round(share * 1000) // 1000) - 1)] if ranked else 0.0


def story(recovery: Recovery) -> str:
    """Tell in words what happened to a request."""
    answered = recovery.answered
    ask, trace = answered.ask, answered.trace
    begins_s, ends_s = answered.wait
    waited = (
        f"event {answered.gap_after + 1}" if answered.first_s and begins_s >= answered.first_s else "the first token"
    )
    parts = [
        f"request {ask.number} ({ask.shape}, {len(ask.prompt) or 'chat'} tokens in, {ask.max_tokens} out) at frontend-"
        f"{answered.frontend} waited {ends_s - begins_s:.2f} s for {waited}, from {begins_s:.2f} s on",
        f"workers: {trace.get('prefill_worker') or '-'}, {trace.get('decode_worker') or '-'}, "
        f"{trace.get('migrations', '?')} migrations",
        "faults: "
        + ("; ".join(f"{one.fault.in_words()} (done {one.ended_s:.1f} s)" for one in recovery.hits) or "none"),
    ]
    return "; ".join(parts)
