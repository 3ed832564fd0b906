"""Answer a what-if question: fit, reproduce, judge, and only then simulate what is asked about."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.frontend.whatif.question import FEWEST_JUDGED, PastMesh, WhatIfQuestion
from kvmesh.protocol.errors import ConfigError
from kvmesh.simulator.access_log import AccessLine
from kvmesh.simulator.config import SimConfig
from kvmesh.simulator.open_request import SimAnswer
from kvmesh.simulator.whatif.cases import FleetCounts, WhatIfCase, cases_of, check_size, fleet_of
from kvmesh.simulator.whatif.figures import (
    MOST_ERROR,
    FigureError,
    ServedRequest,
    ServiceFigures,
    errors_of,
    figures_of,
    worst_of,
)
from kvmesh.simulator.whatif.speeds import WorkerSpeeds, calibrated, first_guess
from kvmesh.simulator.whatif.traffic import PastRequest, PastTraffic, read_traffic
from kvmesh.simulator.whatif.turns import with_turns
from kvmesh.simulator.world import simulate

AS_IT_WAS = "as it was"
Tell = Callable[[str], object]


class CaseAnswer(Struct, frozen=True):
    """Hold what the judged requests would have seen."""

    case: WhatIfCase
    figures: ServiceFigures


class WhatIfReport(Struct, frozen=True, kw_only=True):
    model: str
    fleet: FleetCounts
    blocks: int
    block_size: int
    policy: str
    ttft_slo_s: float
    itl_slo_s: float
    span_s: float  # from the first request to the last
    requests: int
    judged: int  # the later half, on which everything is measured
    failed: int  # requests that the mesh refused or broke off; they are not simulated
    left_out: int  # answered requests whose lines do not say enough, or that asked for several answers
    is_cut: bool  # there were more requests than the limit: the latest count
    speeds: WorkerSpeeds
    measured: ServiceFigures
    simulated: ServiceFigures
    errors: tuple[FigureError, ...]
    error: float  # the largest of them, without its sign
    most_error: float = MOST_ERROR
    is_known: bool  # false: there are no answers
    why: str = ""  # not known
    answers: tuple[CaseAnswer, ...] = ()


def answer(
    lines: Iterable[tuple[float, AccessLine]],
    question: WhatIfQuestion,
    meshes: Sequence[PastMesh],
    tell: Tell = bool,
) -> WhatIfReport:
    """Return the answer to a question about the requests of a log. Raise ConfigError if there is none to give."""
    found = read_traffic(lines, question, meshes)
    traffic = replace(found, requests=with_turns(found.requests, found.mesh.block_size))
    mesh, fleet, cases = traffic.mesh, fleet_of(traffic.mesh), cases_of(question, traffic.mesh)
    if len(traffic.requests) < 2 * FEWEST_JUDGED:
        raise ConfigError(
            f"there are {len(traffic.requests)} requests to learn from",
            hint=f"at least {2 * FEWEST_JUDGED} are needed: send more, or set --last to a longer time",
        )
    check_size(fleet, mesh.blocks)
    half = len(traffic.requests) // 2
    was = WhatIfCase(AS_IT_WAS, fleet, mesh.blocks, mesh.policy)
    tell(f"fitting the speeds of the workers to {half} requests")
    speeds = fitted(traffic.requests[:half], mesh, was)
    tell(f"simulating what really happened with {len(traffic.requests)} requests")
    judge = partial(judged, traffic.requests, half, mesh, speeds)
    later = [served_of(one) for one in traffic.requests[half:]]
    measured = figures_of(later, mesh.ttft_slo_s, mesh.itl_slo_s)
    simulated = judge(was)
    errors = errors_of(measured, simulated)
    why = doubt(traffic, errors, simulated)
    answers: list[CaseAnswer] = []
    for case in cases if not why else ():
        tell(f"simulating {case.name}")
        answers.append(CaseAnswer(case, judge(case)))
    return report_of(traffic, was, half, speeds, measured, simulated, errors, why, answers)


def report_of(
    traffic: PastTraffic,
    was: WhatIfCase,
    half: int,
    speeds: WorkerSpeeds,
    measured: ServiceFigures,
    simulated: ServiceFigures,
    errors: Sequence[FigureError],
    why: str,
    answers: Sequence[CaseAnswer],
) -> WhatIfReport:
    mesh, requests = traffic.mesh, traffic.requests
    return WhatIfReport(
        model=mesh.model,
        fleet=was.fleet,
        blocks=was.blocks,
        block_size=mesh.block_size,
        policy=was.policy,
        ttft_slo_s=mesh.ttft_slo_s,
        itl_slo_s=mesh.itl_slo_s,
        span_s=requests[-1].arrival_s,
        requests=len(requests),
        judged=len(requests) - half,
        failed=traffic.failed,
        left_out=traffic.left_out,
        is_cut=traffic.is_cut,
        speeds=speeds,
        measured=measured,
        simulated=simulated,
        errors=tuple(errors),
        error=worst_of(errors),
        is_known=not why,
        why=why,
        answers=tuple(answers),
    )


def doubt(traffic: PastTraffic, errors: Sequence[FigureError], simulated: ServiceFigures) -> str:
    """Return why nothing is known, "" if the simulation reproduces what happened."""
    missing, count = traffic.failed + traffic.left_out, len(traffic.requests)
    if missing > MOST_ERROR * (count + missing):
        return f"{missing} of {count + missing} requests failed or are not described, so their load is not known"
    worst = max(errors, key=lambda error: abs(error.error))
    if abs(worst.error) > MOST_ERROR:
        return (
            f"the simulation of what really happened is {abs(worst.error):.0%} off ({worst.name}), "
            f"and beyond {MOST_ERROR:.0%} its answers mean nothing"
        )
    return ""


def fitted(requests: Sequence[PastRequest], mesh: PastMesh, was: WhatIfCase) -> WorkerSpeeds:
    """Return the speeds with which the simulation takes as long as these requests took."""
    guess = first_guess(requests, mesh.max_step_tokens)
    return calibrated(guess, requests, lambda speeds: simulated_answers(requests, mesh, was, speeds))


def judged(
    requests: Sequence[PastRequest], half: int, mesh: PastMesh, speeds: WorkerSpeeds, case: WhatIfCase
) -> ServiceFigures:
    """Return the figures of the later half of the requests; the earlier one fills caches and queues."""
    answers = [one for one in simulated_answers(requests, mesh, case, speeds) if one.number >= half]
    served = [
        ServedRequest(requests[one.number].request.isl_tokens, one.cached_tokens, one.ttft_s, one.itl_s)
        for one in answers
    ]
    return figures_of(served, mesh.ttft_slo_s, mesh.itl_slo_s, failed=len(requests) - half - len(answers))


def served_of(one: PastRequest) -> ServedRequest:
    return ServedRequest(one.request.isl_tokens, one.cached_tokens, one.ttft_s, one.itl_s)


def simulated_answers(
    requests: Sequence[PastRequest], mesh: PastMesh, case: WhatIfCase, speeds: WorkerSpeeds
) -> list[SimAnswer]:
    """Return the answers of a simulated mesh, in the order of their ends. A request that failed has none."""
    answers: list[SimAnswer] = []
    simulate((one.request for one in requests), settings_of(mesh, case, speeds), on_answer=answers.append)
    return answers


def settings_of(mesh: PastMesh, case: WhatIfCase, speeds: WorkerSpeeds) -> SimConfig:
    """Return the settings of a simulation. Without prefill workers every worker computes prompts."""
    fleet, profile = case.fleet, speeds.profile(case.blocks, mesh.block_size)
    return SimConfig(
        mode="disaggregated" if fleet.prefill else "aggregated",
        workers=fleet.workers,
        prefill_workers=fleet.prefill,
        blocks=case.blocks,
        block_size=mesh.block_size,
        max_num_seqs=mesh.max_num_seqs,
        max_step_tokens=mesh.max_step_tokens,
        prefill_profile=profile,
        decode_profile=profile,
        kv_bandwidth_gbps=speeds.bandwidth_gbps,
        policy=case.policy,
        recompute_price=mesh.recompute_price,
        saturation_tokens=mesh.saturation_tokens,
        hop_s=speeds.hop_s,
        ttft_slo_s=mesh.ttft_slo_s,
        itl_slo_s=mesh.itl_slo_s,
        keeps_itl=mesh.keeps_itl,
    )
