"""Turn the outcomes of requests into figures. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.commands.bench.results import GeneratorLoad, LoadPoint, PointResult, RequestOutcome, SaturationPoint
from kvmesh.simulator.report import Spread
from kvmesh.simulator.tally import PercentileTally

FULL_CORE = 0.85  # from here on the sender's own core is the bottleneck
LATE_S = 0.010  # a p99 of lateness from which on the schedule was not kept
LATE_LOOP_S = 0.010
FULL_MACHINE = 0.95
KEEPS_UP = 0.9  # an endpoint that completes less of what is offered is saturated
MOST_OF = 0.95  # of the most answers that any number of clients got
FEW_ERRORS = 0.01
MIDDLE = 0.05  # left out at both ends for the rate of completions
_NUMBER = re.compile(r"[0-9.]+")


class ServeSlo(Struct, frozen=True):
    """Say what a good request is. `e2e_s` 0: no limit."""

    ttft_s: float
    itl_s: float
    e2e_s: float = 0.0

    def is_met(self, outcome: RequestOutcome) -> bool:
        tpot = tpot_of(outcome)
        return (
            not outcome.failure
            and ttft_of(outcome) <= self.ttft_s
            and (tpot is None or tpot <= self.itl_s)
            and (not self.e2e_s or outcome.end_s - outcome.due_s <= self.e2e_s)
        )


class MeasuredRound(Struct, frozen=True):
    """Hold one endpoint at one point, once."""

    outcomes: Sequence[RequestOutcome]
    duration_s: float
    generator: GeneratorLoad


class RunTotals(Struct, frozen=True, kw_only=True):
    """Hold the facts about a point that do not come from single requests."""

    rounds: int
    duration_s: float
    offered_rps: float
    completion_rate: float
    generator: GeneratorLoad | None


def ttft_of(outcome: RequestOutcome) -> float:
    """Return the time from when the request was due to its first token; an answer without text has its end."""
    return (outcome.first_s or outcome.end_s) - outcome.due_s


def tpot_of(outcome: RequestOutcome) -> float | None:
    """Return the mean time per output token after the first, None for fewer than two tokens."""
    if outcome.tokens < 2 or not outcome.first_s:
        return None
    return (outcome.last_s - outcome.first_s) / (outcome.tokens - 1)


def spread_of(values: Iterable[float]) -> Spread | None:
    tally = PercentileTally()
    for value in values:
        tally.add(max(0.0, value))
    if not tally.count:
        return None
    p50, p90, p95, p99 = (tally.percentile(share) for share in (0.5, 0.9, 0.95, 0.99))
    return Spread(mean=tally.mean, p50=p50, p90=p90, p95=p95, p99=p99, max=tally.largest)


def completion_rate(outcomes: Sequence[RequestOutcome]) -> float:
    """Return completions per second in the middle of a run: neither its start nor the last stragglers count."""
    return _middle_rate([outcome.end_s for outcome in outcomes if not outcome.failure])


def offered_rps(outcomes: Sequence[RequestOutcome]) -> float:
    """Return how many requests were due per second, in the same middle of the run."""
    return _middle_rate([outcome.due_s for outcome in outcomes])


def _middle_rate(times: Sequence[float]) -> float:
    ordered = sorted(times)
    cut = int(len(ordered) * MIDDLE)
    if len(ordered) < 2 or ordered[-1 - cut] <= ordered[cut]:
        return 0.0
    return (len(ordered) - 1 - 2 * cut) / (ordered[-1 - cut] - ordered[cut])


def point_result(
    endpoint: str, point: LoadPoint, rounds: Sequence[MeasuredRound], slo: ServeSlo, gpus: float
) -> PointResult:
    """Return the figures of an endpoint at a point, over all its rounds."""
    run = RunTotals(
        rounds=len(rounds),
        duration_s=sum(one.duration_s for one in rounds),
        offered_rps=_per(sum(offered_rps(one.outcomes) for one in rounds), len(rounds)),
        completion_rate=_per(sum(completion_rate(one.outcomes) for one in rounds), len(rounds)),
        generator=joined_load([one.generator for one in rounds]),
    )
    return point_figures(endpoint, point, [outcome for one in rounds for outcome in one.outcomes], run, slo, gpus)


def point_figures(
    endpoint: str, point: LoadPoint, outcomes: Sequence[RequestOutcome], run: RunTotals, slo: ServeSlo, gpus: float
) -> PointResult:
    """Return the figures of requests that any driver has sent."""
    whole = [outcome for outcome in outcomes if not outcome.failure]
    osl, isl = sum(o.tokens for o in whole), sum(o.prompt_tokens for o in whole)
    good = sum(slo.is_met(outcome) for outcome in outcomes)
    tpot = spread_of(tpot for outcome in whole if (tpot := tpot_of(outcome)) is not None)
    result = PointResult(
        endpoint=endpoint,
        point=point,
        rounds=run.rounds,
        requests=len(outcomes),
        offered_rps=run.offered_rps,
        completed=len(whole),
        errors=dict(Counter(outcome.failure for outcome in outcomes if outcome.failure)),
        error_examples={outcome.failure: outcome.detail for outcome in reversed(outcomes) if outcome.failure},
        short_answers=sum(o.has_usage and o.tokens < o.asked_tokens for o in whole),
        duration_s=run.duration_s,
        isl_tokens=_per(isl, len(whole)),
        osl_tokens=_per(osl, len(whole)),
        cached_share=cached_share(whole),
        ttft_s=spread_of(ttft_of(o) for o in whole),
        itl_s=spread_of(gap for o in whole for gap in o.gaps_s),
        tpot_s=tpot,
        e2e_s=spread_of(o.end_s - o.due_s for o in whole),
        requests_per_s=_per(len(whole), run.duration_s),
        completion_rate=run.completion_rate,
        output_tokens_per_s=_per(osl, run.duration_s),
        total_tokens_per_s=_per(osl + isl, run.duration_s),
        output_tokens_per_s_gpu=_per(osl, run.duration_s * gpus),
        tokens_per_s_user=1 / tpot.mean if tpot and tpot.mean else 0.0,
        attainment=_per(good, len(outcomes)),
        goodput_rps=_per(good, run.duration_s),
        tokens_per_event=_per(osl, sum(o.events for o in whole)),
        usage_share=_per(sum(o.has_usage for o in whole), len(whole)),
        generator=run.generator,
        limit_rps=None if run.generator is None else _per(len(outcomes), run.generator.cpu_s) or None,
    )
    return replace(result, notes=tuple(notes_on(result)))


def cached_share(outcomes: Sequence[RequestOutcome]) -> float | None:
    """Return the share of the prompt tokens that endpoints report as cached, None if they do not report it."""
    told = [outcome for outcome in outcomes if outcome.cached_tokens is not None]
    if not told:
        return None
    return _per(sum(o.cached_tokens or 0 for o in told), sum(o.prompt_tokens for o in told))


def joined_load(loads: Sequence[GeneratorLoad]) -> GeneratorLoad:
    """Return the worst of several rounds, and their CPU in sum."""
    return GeneratorLoad(
        cpu_s=sum(load.cpu_s for load in loads),
        cpu_share=max(load.cpu_share for load in loads),
        lag_p50_s=max(load.lag_p50_s for load in loads),
        lag_p99_s=max(load.lag_p99_s for load in loads),
        lag_max_s=max(load.lag_max_s for load in loads),
        loop_lag_p99_s=max(load.loop_lag_p99_s for load in loads),
        machine_cpu_share=max(load.machine_cpu_share for load in loads),
    )


def _per(amount: float, count: float) -> float:
    return amount / count if count else 0.0


def notes_on(result: PointResult) -> list[str]:
    """Return what makes the figures of a point doubtful, in sentences."""
    notes = []
    load = result.generator
    if load is not None:
        if load.cpu_share > FULL_CORE:
            notes.append(f"the load generator used {load.cpu_share:.0%} of a core: it is the bottleneck")
        if load.lag_p99_s > LATE_S:
            notes.append(
                f"requests were sent up to {load.lag_p99_s * 1e3:.0f} ms late (p99): the load is too high here"
            )
        elif load.loop_lag_p99_s > LATE_LOOP_S:
            late = f"{load.loop_lag_p99_s * 1e3:.0f} ms"
            notes.append(f"the load generator noticed events up to {late} late (p99), which is part of every time")
        if load.machine_cpu_share > FULL_MACHINE:
            notes.append(f"this machine was {load.machine_cpu_share:.0%} busy: what runs on it competes for its cores")
    if result.completed and result.usage_share < 1:
        notes.append("answers came without usage: their tokens are counted by events, their prompts not at all")
    if result.tokens_per_event > 1.05:
        notes.append(
            f"an event brings {result.tokens_per_event:.2f} tokens: ITL is that of events, TPOT that of tokens"
        )
    if result.short_answers:
        notes.append(f"{result.short_answers} answers are shorter than asked for: ignore_eos is not obeyed")
    return notes


# --- saturation --------------------------------------------------------------------------------------------


def saturation_of(results: Sequence[PointResult]) -> list[SaturationPoint]:
    """Return where each endpoint is saturated, for each kind of sweep."""
    sweeps: dict[tuple[str, str, float], list[PointResult]] = {}
    for result in results:
        if result.point.kind != "trace":
            sweeps.setdefault((result.endpoint, result.point.kind, result.point.prefix_ratio), []).append(result)
    return [_saturation(sorted(sweep, key=lambda r: r.point.value)) for sweep in sweeps.values()]


def _saturation(sweep: Sequence[PointResult]) -> SaturationPoint:
    most = max(result.requests_per_s for result in sweep)
    best = max(sweep, key=lambda result: result.goodput_rps)
    first = sweep[0]
    if first.point.kind == "rate":
        is_full = [not keeps_up(result) for result in sweep]
    else:  # more clients bring no more answers; the last point can show nothing
        is_full = [result.requests_per_s >= MOST_OF * most for result in sweep[:-1]] + [False]
    at = next((result.point.value for result, full in zip(sweep, is_full, strict=True) if full), None)
    below = [result.point.value for result in sweep if at is None or result.point.value < at]
    return SaturationPoint(
        endpoint=first.endpoint,
        kind=first.point.kind,
        prefix_ratio=first.point.prefix_ratio,
        at=at,
        last_below=below[-1] if below else None,
        most_requests_per_s=max(result.completion_rate for result in sweep),
        most_goodput_rps=best.goodput_rps,
        most_goodput_at=best.point.value if best.goodput_rps > 0 else None,
    )


def keeps_up(result: PointResult) -> bool:
    """Return whether an endpoint completes what is offered: also in bursts, a queue that drains is no saturation."""
    failed = result.requests - result.completed
    return failed <= FEW_ERRORS * result.requests and result.completion_rate >= KEEPS_UP * result.offered_rps


def warnings_of(results: Sequence[PointResult]) -> list[str]:
    """Return each kind of note once, with the first point that has it and the number of the others."""
    kinds: dict[str, list[str]] = {}
    for result in results:
        for note in result.notes:
            kinds.setdefault(_NUMBER.sub("#", note), []).append(f"{result.endpoint}, {result.point.label}: {note}")
    return [
        f"{notes[0]} (and at {len(notes) - 1} other points)" if len(notes) > 1 else notes[0] for notes in kinds.values()
    ]
