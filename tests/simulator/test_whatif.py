"""The speeds are found, the past is reproduced or nothing is answered, and other fleets come out as they would."""

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import pytest
from msgspec.structs import replace

from kvmesh.frontend.whatif.question import AskedMesh, PastMesh, SeenWorker, WhatIfQuestion
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from kvmesh.simulator import SimConfig, SimRequest, simulate
from kvmesh.simulator.access_log import AccessLine
from kvmesh.simulator.open_request import SimAnswer
from kvmesh.simulator.whatif.answer import WhatIfReport, answer
from kvmesh.simulator.whatif.cases import FleetCounts, cases_of, texts_of
from kvmesh.simulator.whatif.figures import ServedRequest, ServiceFigures, errors_of, figures_of, worst_of
from kvmesh.simulator.whatif.speeds import SeenTime, fit_line
from tests.simulator.past import BLOCK_SIZE, SPLIT, TOGETHER, lines_of, load

Lines = list[tuple[float, AccessLine]]
MESH = PastMesh(model="", block_size=BLOCK_SIZE, blocks=2048, max_num_seqs=32, max_step_tokens=512)
KNOWN = replace(
    MESH, model="m", workers=(SeenWorker("p", Role.PREFILL), SeenWorker("d", Role.DECODE), SeenWorker("e", Role.DECODE))
)


@pytest.fixture(scope="module")
def requests() -> list[SimRequest]:
    return load()


@pytest.fixture(scope="module", params=[SPLIT, TOGETHER], ids=["split", "together"])
def config(request: pytest.FixtureRequest) -> SimConfig:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def report(requests: list[SimRequest], config: SimConfig) -> WhatIfReport:
    return answer(lines_of(requests, config), WhatIfQuestion(), [MESH])


def truth(requests: Sequence[SimRequest], config: SimConfig) -> ServiceFigures:
    """Return what the later half of the requests see of a mesh with the true speeds."""
    answers: list[SimAnswer] = []
    simulate(requests, config, on_answer=answers.append)
    half = len(requests) // 2
    served = [
        ServedRequest(requests[one.number].isl_tokens, one.cached_tokens, one.ttft_s, one.itl_s)
        for one in answers
        if one.number >= half
    ]
    return figures_of(served, config.ttft_slo_s, config.itl_slo_s)


# --- fit and judgement --------------------------------------------------------------------------------------------


def test_the_speeds_are_found_in_the_requests_alone(report: WhatIfReport) -> None:
    speeds = report.speeds
    assert speeds.step_s + 400 * speeds.token_s == pytest.approx(0.0226, rel=0.05)  # 16.5 ms + 15.2 us a token
    assert speeds.decode_s + 2000 * speeds.kv_token_s == pytest.approx(0.0089, rel=0.05)  # 5.74 ms + 1.6 us a token


def test_what_really_happened_is_reproduced(report: WhatIfReport) -> None:
    assert report.is_known and report.error < 0.1
    assert {error.name for error in report.errors} == {
        *("ttft_p50_s", "ttft_p90_s", "itl_p50_s", "itl_p90_s", "hit_share", "attainment")
    }


def test_other_fleets_come_out_as_they_would_have(
    report: WhatIfReport, requests: list[SimRequest], config: SimConfig
) -> None:
    assert len(report.answers) >= 2
    for one in report.answers:
        fleet = one.case.fleet
        real = truth(requests, replace(config, workers=fleet.workers, prefill_workers=fleet.prefill))
        assert worst_of(errors_of(real, one.figures)) < 0.1, one.case.name


def test_another_policy_and_cache_come_out_as_they_would_have(requests: list[SimRequest]) -> None:
    steady = replace(TOGETHER, prefill_rate=20_000, itl_s=0.008)  # times that do not depend on the size of the cache
    [one] = answer(lines_of(requests, steady), WhatIfQuestion(policy="round-robin", blocks="200"), [MESH]).answers
    real = truth(requests, replace(steady, policy="round-robin", blocks=200))
    assert real.hit_share < truth(requests, steady).hit_share - 0.05
    assert worst_of(errors_of(real, one.figures)) < 0.1


def test_a_past_that_is_not_reproduced_gives_no_answer(requests: list[SimRequest]) -> None:
    report = answer(lines_of(requests, TOGETHER, slowed=1.4), WhatIfQuestion(), [MESH])
    assert (report.is_known, report.answers) == (False, ())
    assert report.error == pytest.approx(0.29, abs=0.05)  # 1 - 1 / 1.4
    assert "29%" in report.why or "beyond 20%" in report.why


def test_a_cache_that_was_smaller_than_believed_is_noticed(requests: list[SimRequest]) -> None:
    report = answer(lines_of(requests, replace(TOGETHER, blocks=200)), WhatIfQuestion(), [MESH])
    assert not report.is_known
    assert report.answers == ()


def test_requests_that_failed_are_a_load_that_is_not_known(requests: list[SimRequest]) -> None:
    lines = lines_of(requests, TOGETHER)
    failed = AccessLine(endpoint="completions", outcome="overloaded", model="m")
    many = sorted([*lines, *((at, failed) for at, _ in lines[::3])], key=lambda found: found[0])
    report = answer(many, WhatIfQuestion(), [MESH])
    assert not report.is_known
    assert "failed" in report.why
    few = sorted([*lines, *((at, failed) for at, _ in lines[::50])], key=lambda found: found[0])
    assert answer(few, WhatIfQuestion(), [MESH]).is_known


def test_too_few_requests_teach_nothing(requests: list[SimRequest]) -> None:
    with pytest.raises(ConfigError, match="39 requests to learn from"):
        answer(lines_of(requests, TOGETHER)[:39], WhatIfQuestion(), [MESH])
    with pytest.raises(ConfigError, match="no request that a worker has answered"):
        answer([], WhatIfQuestion(), [MESH])


def test_only_the_asked_time_and_model_count(requests: list[SimRequest]) -> None:
    lines = lines_of(requests, TOGETHER)
    others = [(at, replace(line, model="other", worker="x")) for at, line in lines]
    both = sorted([*lines, *others], key=lambda found: found[0])
    with pytest.raises(ConfigError, match="m, other; name one"):
        answer(both, WhatIfQuestion(), [MESH])
    report = answer(both, WhatIfQuestion(model="m", last_s=30), [MESH])
    assert 20 < report.span_s <= 30
    assert report.fleet == FleetCounts(aggregated=2)
    assert answer(both, WhatIfQuestion(model="m", limit=50), [MESH]).is_cut


# --- figures ------------------------------------------------------------------------------------------------------


def test_a_line_far_off_does_not_bend_the_fit() -> None:
    seen = [SeenTime(1.0, x, 5 + 0.5 * x, 5 + 0.5 * x) for x in range(1, 40)]
    a, b = fit_line([*seen, SeenTime(1.0, 20, 900.0, 900.0)])
    assert (a, b) == pytest.approx((5, 0.5), rel=1e-6)


def test_times_are_never_fitted_below_zero() -> None:
    assert fit_line([SeenTime(1.0, x, 10 - x, 5.0) for x in range(1, 9)])[1] == 0
    assert fit_line([]) == (0.0, 0.0)


def test_the_error_of_a_small_share_is_measured_against_a_tenth() -> None:
    def figures(hit_share: float, ttft_s: float = 1.0) -> ServiceFigures:
        return figures_of([ServedRequest(1000, int(1000 * hit_share), ttft_s, None)], 2.0, 0.1)

    def error(real: ServiceFigures, made: ServiceFigures) -> float:
        return worst_of(errors_of(real, made))

    assert error(figures(0.02), figures(0.01)) == pytest.approx(0.1)
    assert error(figures(0.5), figures(0.4)) == pytest.approx(0.2)
    assert error(figures(0.5, 1.0), figures(0.5, 1.3)) == pytest.approx(0.3)


# --- cases --------------------------------------------------------------------------------------------------------


def test_without_changes_each_role_gets_one_more_and_one_less() -> None:
    cases = cases_of(WhatIfQuestion(), KNOWN)
    assert [case.name for case in cases] == ["prefill +1", "decode +1", "decode -1"]
    assert cases[2].fleet == FleetCounts(prefill=1, decode=1)


def test_lists_make_a_case_of_each_combination() -> None:
    cases = cases_of(WhatIfQuestion(decode="+1,4", policy="kv,random", blocks="x2"), KNOWN)
    assert [(case.fleet.decode, case.policy, case.blocks) for case in cases] == [
        (3, "kv", 4096),
        (3, "random", 4096),
        (4, "kv", 4096),
        (4, "random", 4096),
    ]


def test_a_plus_that_a_url_took_for_a_space_is_one() -> None:
    assert texts_of(" 1,-1, 2") == ["+1", "-1", "+2"]


def test_a_whole_other_fleet_can_be_asked_for() -> None:
    [case] = cases_of(WhatIfQuestion(prefill="0", decode="0", aggregated="3"), KNOWN)
    assert case.fleet == FleetCounts(aggregated=3)


@pytest.mark.parametrize(
    ("question", "found"),
    [
        (WhatIfQuestion(decode="-2"), "nobody answers"),
        (WhatIfQuestion(decode="-3"), "there are 2"),
        (WhatIfQuestion(aggregated="1"), "aggregated and other workers"),
        (WhatIfQuestion(decode="many"), "write a count"),
        (WhatIfQuestion(decode="999999"), "more than 4096 workers"),
        (WhatIfQuestion(blocks="+4"), "x2 for twice"),
        (WhatIfQuestion(blocks="x0.0001"), "at least 2"),
        (WhatIfQuestion(blocks="x5000"), "together"),
        (WhatIfQuestion(policy="best"), "one of kv, least-loaded"),
        (WhatIfQuestion(decode="1,2,3,4", prefill="1,2,3,4"), "16 cases"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(question: WhatIfQuestion, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        cases_of(question, KNOWN)


# --- the process --------------------------------------------------------------------------------------------------


def answered(question: WhatIfQuestion, requests: list[SimRequest]) -> dict[str, object]:
    """Return what the process of a frontend says."""
    lines = [msgspec.json.encode(AskedMesh(question=question, meshes=(MESH,)))]
    for at, line in lines_of(requests, TOGETHER):
        ts = datetime.fromtimestamp(1_800_000_000 + at, UTC).isoformat()
        lines.append(msgspec.json.encode(msgspec.to_builtins(line) | {"ts": ts}))
    command = [sys.executable, "-m", "kvmesh.simulator.whatif"]
    process = subprocess.run(command, input=b"\n".join(lines), capture_output=True, timeout=120, check=True)
    return dict(msgspec.json.decode(process.stdout))


def test_the_process_answers_with_the_report(requests: list[SimRequest]) -> None:
    report = answered(WhatIfQuestion(aggregated="+1"), requests)
    assert report["is_known"] and len(list(report["answers"])) == 1  # type: ignore[call-overload]
