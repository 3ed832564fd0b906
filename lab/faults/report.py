"""Sum a run up: the fields of `kvmesh lab faults --json`, and whether the run was clean."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from kvmesh.lab.faults.oracle import Answered, Judged, Verdict
from kvmesh.lab.faults.quiet import Remains
from kvmesh.lab.faults.recovery import Happened, Recovery, is_excused, percentile, recovery_of, story, usual_waits
from kvmesh.lab.faults.schedule import Schedule

MOST_RECOVERY_S = 3.0  # at the 99th percentile, for a run to be clean
LEAST_MEASURED = 20  # requests that were hit; of fewer the slowest would be the percentile
MOST_SHOWN = 20
BAD = (Verdict.HUNG, Verdict.EMPTY, Verdict.WRONG, Verdict.REFUSED, Verdict.TRUNCATED)


class FaultsReport(Struct, frozen=True, kw_only=True):
    """Counts are requests unless their comment says otherwise. Zeros in `hung` to `crashed` make a clean run."""

    ok: bool
    seed: int
    seconds: float
    without: str
    requests: int
    faults: Mapping[str, int]  # carried out, by kind
    skipped: Mapping[str, str]  # kinds that this machine cannot make, and why
    hung: int
    empty_200: int
    wrong_tokens: int
    refused: int  # right requests that were told to be wrong
    truncated: int
    leaked: int  # gauges, blocks, offers, descriptors, tasks, shared memory, processes
    diverged: int  # views that a router has of a worker's cache
    crashed: int  # processes that ended although no fault made them
    failed_checks: int  # what faults check themselves: orders, bombs, a second mesh in a run directory
    errors_reported: int
    error_codes: Mapping[str, int]
    error_examples: Mapping[str, str]  # the first of each code
    migrated: int
    hit: int  # by a fault
    p50_recovery_s: float
    p99_recovery_s: float
    slowest: list[str]
    quiet_s: float  # until nothing was left
    problems: list[str]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Hold all that was seen in a run."""

    schedule: Schedule
    judged: Sequence[tuple[Answered, Judged]]
    happened: Sequence[Happened]
    remains: Remains
    skipped: Mapping[str, str]
    crashed: Sequence[str]
    complaints: Sequence[str] = ()
    without: str = ""


def judge_run(seen: RunRecord) -> FaultsReport:
    """Return the report of a run that is over."""
    judged = [(a, _excuse(a, j, seen.happened)) for a, j in seen.judged]
    counts = Counter(j.verdict for _, j in judged)
    hits = recoveries(judged, seen.happened)
    costs_s = [recovery.cost_s for recovery in hits]
    problems = problems_of(seen, judged, costs_s)
    errors = [code_of(answered) for answered, j in judged if j.verdict is Verdict.ERROR]
    return FaultsReport(
        ok=not problems,
        seed=seen.schedule.seed,
        seconds=seen.schedule.seconds,
        without=seen.without,
        requests=len(judged),
        faults=dict(sorted(Counter(one.fault.kind for one in seen.happened if not one.note).items())),
        skipped=dict(seen.skipped),
        hung=counts[Verdict.HUNG],
        empty_200=counts[Verdict.EMPTY],
        wrong_tokens=counts[Verdict.WRONG],
        refused=counts[Verdict.REFUSED],
        truncated=counts[Verdict.TRUNCATED],
        leaked=len(seen.remains.leaked),
        diverged=len(seen.remains.diverged),
        crashed=len(seen.crashed),
        failed_checks=len(seen.complaints),
        errors_reported=counts[Verdict.ERROR],
        error_codes=dict(sorted(Counter(map(str, errors)).items())),
        error_examples=error_examples(judged),
        migrated=sum(1 for answered, _ in judged if answered.trace.get("migrations")),
        hit=len(hits),
        p50_recovery_s=round(percentile(costs_s, 0.5), 3),
        p99_recovery_s=round(percentile(costs_s, 0.99), 3),
        slowest=[_told(r) for r in sorted(hits, key=lambda r: -r.cost_s)[:3]],
        quiet_s=round(seen.remains.took_s, 2),
        problems=problems[:MOST_SHOWN],
    )


def code_of(answered: Answered) -> str:
    """Return the code of an error that was reported, or the way in which the connection broke."""
    return str((answered.error or {}).get("code") or answered.broken.partition(":")[0])


def error_examples(judged: Sequence[tuple[Answered, Judged]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for answered, j in judged:
        if j.verdict is Verdict.ERROR:
            found.setdefault(
                code_of(answered), f"request {answered.ask.number} at {answered.sent_s:.1f} s: {j.why}"[:300]
            )
    return found


def recoveries(judged: Sequence[tuple[Answered, Judged]], happened: Sequence[Happened]) -> list[Recovery]:
    """Return what faults cost each right answer that they have hit."""
    usual = usual_waits([answered for answered, _ in judged], happened)
    return [
        recovery
        for answered, j in judged
        if j.verdict is Verdict.RIGHT
        and (recovery := recovery_of(answered, happened, usual.get(answered.ask.shape, 0.0))) is not None
    ]


def problems_of(seen: RunRecord, judged: Sequence[tuple[Answered, Judged]], costs_s: Sequence[float]) -> list[str]:
    """Return why the run was not clean; nothing if it was."""
    problems = [
        f"{j.verdict.value}: request {a.ask.number} ({a.ask.shape}) at {a.sent_s:.1f} s: {j.why}"
        for a, j in judged
        if j.verdict in BAD
    ]
    problems += [f"leaked: {line}" for line in seen.remains.leaked]
    problems += [f"diverged: {line}" for line in seen.remains.diverged]
    problems += [f"crashed: {line}" for line in seen.crashed]
    problems += [f"failed check: {line}" for line in seen.complaints]
    p99_s = percentile(costs_s, 0.99)
    if p99_s > MOST_RECOVERY_S and len(costs_s) >= LEAST_MEASURED:
        problems.append(f"slow: the 99th percentile of recovery is {p99_s:.2f} s, the limit is {MOST_RECOVERY_S} s")
    return problems


def _excuse(answered: Answered, judged: Judged, happened: Sequence[Happened]) -> Judged:
    """A client whose frontend was killed sees that its connection broke: that is no answer that looks whole."""
    if judged.verdict in (Verdict.TRUNCATED, Verdict.EMPTY) and is_excused(answered, happened):
        return Judged(Verdict.ERROR, judged.why)
    return judged


def _told(recovery: Recovery) -> str:
    return f"+{recovery.cost_s:.2f} s: {story(recovery)}"
