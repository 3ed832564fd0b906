"""The loads of `kvmesh lab overload`, and what it makes of the answers."""

import json
from itertools import pairwise

import pytest
from rich.console import Console

from kvmesh.lab.overload.client import LoadAnswer
from kvmesh.lab.overload.command import OverloadConfig, loads_of, measure, simulated_of
from kvmesh.lab.overload.report import (
    MeasuredCapacity,
    NormalAnswers,
    capacity_of,
    is_in_time,
    normal_again_s,
    normal_of,
    phase_numbers,
    quantile,
)
from kvmesh.lab.overload.shapes import (
    SHAPES,
    SHARED_TOKENS,
    PlannedRequest,
    Segment,
    ShapeName,
    block_names,
    planned,
    samples,
    written,
)
from kvmesh.lab.overload.simulated import SimulatedMesh
from kvmesh.protocol.errors import ConfigError

NORMAL = NormalAnswers(0.2, 1)


def answered(
    at_s: float, *, end_s: float = 1.0, first_s: float = 0.1, tokens: int = 10, deadline_s: float = 10.0
) -> LoadAnswer:
    return LoadAnswer(at_s, 0.0, 200, first_s, end_s, tokens, True, deadline_s, False)


def refused(at_s: float, after_s: float = 0.002) -> LoadAnswer:
    return LoadAnswer(at_s, 0.0, 429, 0.0, after_s, 0, False, 10.0, False)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_seed_makes_one_load(shape: ShapeName) -> None:
    segments = [Segment(20, 5), Segment(5, 5)]
    load = planned(shape, segments, 1)
    assert load == planned(shape, segments, 1)
    assert load != planned(shape, segments, 2)
    assert all(a.at_s <= b.at_s for a, b in pairwise(load))
    assert 60 < sum(request.at_s < 5 for request in load) < 140
    assert all(0 <= request.at_s < 10 for request in load)


def test_shapes_differ_in_what_their_names_say() -> None:
    def load(shape: ShapeName) -> list[PlannedRequest]:
        return planned(shape, [Segment(20, 20)], 1)

    assert {r.deadline_s for r in load("deadlines")} == {2, 5, 10, 30, 60}
    assert {r.deadline_s for r in load("tight-deadlines")} == {2, 10, 60}
    assert {r.deadline_s for r in load("no-deadline")} == {0}
    assert any(r.leaves_s for r in load("cancels"))
    assert min(r.isl_tokens for r in load("long-prompts")) == 1500
    assert len({r.prefix for r in load("prefixes")}) > 8
    assert all(r.is_text for r in load("text"))
    lengths = sorted(r.osl_tokens for r in load("heavy-tails"))
    assert lengths[-len(lengths) // 20] > 5 * lengths[len(lengths) // 2]


def test_a_request_is_written_as_it_was_planned() -> None:
    mixed = planned("mix", [Segment(20, 20)], 1)
    for one in mixed[:40]:
        sent = written(one, "tiny")
        body = json.loads(sent.body)
        assert (len(body["prompt"]), body["max_tokens"]) == (one.isl_tokens, one.max_tokens)
        assert len(body.get("stop_token_ids", ())) == one.stops
        assert sent == written(one, "tiny")
    assert written(planned("text", [Segment(5, 5)], 1)[0], "tiny").path == "/v1/chat/completions"


def test_prompts_begin_alike_if_they_share_a_prefix_and_not_otherwise() -> None:
    load = planned("prefixes", [Segment(20, 10)], 1)
    first = load[0]
    same = next(r for r in load[1:] if r.prefix == first.prefix)
    other = next(r for r in load[1:] if r.prefix != first.prefix)
    prompts = [json.loads(written(r, "tiny").body)["prompt"][:SHARED_TOKENS] for r in (first, same, other)]
    assert prompts[0] == prompts[1] != prompts[2]
    names = [block_names(r, 16)[: SHARED_TOKENS // 2] for r in (first, same, other)]
    assert names[0] == names[1] != names[2]


def test_the_closed_loop_has_neither_deadlines_nor_clients_that_leave() -> None:
    assert all(not r.deadline_s and not r.leaves_s for r in samples("cancels", 100, 1))


def test_an_answer_counts_if_it_is_whole_by_its_deadline() -> None:
    assert is_in_time(answered(0, end_s=10.0))
    assert not is_in_time(answered(0, end_s=10.5))
    assert is_in_time(answered(0, end_s=100.0, deadline_s=0.0))
    assert not is_in_time(refused(0))


def test_goodput_is_what_ended_in_time_against_the_capacity() -> None:
    capacity = capacity_of([answered(number / 10) for number in range(200)], 5.0, 15.0)
    assert (capacity.requests_per_s, capacity.tokens_per_s) == pytest.approx((10, 100))
    half = [answered(number / 5) for number in range(100)] + [refused(number / 5) for number in range(100)]
    numbers = phase_numbers(half, 1.0, 20.0, MeasuredCapacity(10, 100), NORMAL)
    assert numbers["goodput"] == pytest.approx(0.5, abs=0.02)
    assert (numbers["in_time"], numbers["refused"], numbers["late"], numbers["failed"]) == (100, 100, 0, 0)
    assert numbers["refused_p99_ms"] == 2.0


def test_a_late_answer_is_no_refusal_and_no_failure() -> None:
    numbers = phase_numbers([answered(1.0, end_s=12.0), answered(2.0)], 1.0, 20.0, MeasuredCapacity(1, 1), NORMAL)
    assert (numbers["in_time"], numbers["late"], numbers["failed"]) == (1, 1, 0)


def test_an_answer_counts_for_the_time_of_its_stream() -> None:
    """A stream across the edge of the measured time counts by its share: when it happens to end does not matter."""
    across = [answered(4.0, first_s=0.0, end_s=4.0, tokens=40)]
    assert capacity_of(across, 5.0, 15.0).tokens_per_s == pytest.approx(3.0)
    assert capacity_of(across, 0.0, 4.0).tokens_per_s == 0


def test_it_is_normal_again_after_the_last_slow_request() -> None:
    normal = normal_of([answered(number) for number in range(40)])
    slow = [answered(20 + number / 10, first_s=2.0) for number in range(10)]
    fast = [answered(21 + number / 10) for number in range(50)]
    assert normal_again_s([*slow, *fast], 20.0, normal) == pytest.approx(1.0, abs=0.3)
    assert normal_again_s(fast, 21.0, normal) == 0
    assert normal_again_s(slow, 20.0, normal) == pytest.approx(0.9)


def test_what_was_slow_before_may_be_slow_again() -> None:
    """One in five was late before: that one in five is late after a load does not mean that it still lasts."""
    late = [answered(number, end_s=99.0 if number % 5 == 0 else 1.0) for number in range(100)]
    normal = normal_of(late)
    assert normal.slow == 4
    assert normal_again_s(late, 41.0, normal) == 0


def test_the_same_mesh_is_simulated() -> None:
    config = simulated_of(OverloadConfig(workers=3, prefill=2, frontends=2))
    assert (config.mode, config.workers, config.num_prefill, config.routers) == ("disaggregated", 5, 2, 2)
    assert simulated_of(OverloadConfig()).mode == "aggregated"


@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_simulated_overload_reports_what_a_live_one_does(prefill: int) -> None:
    config = OverloadConfig(simulate=True, seconds=6.0, capacity_s=6.0, prefill=prefill, workers=1, max_num_seqs=8)
    report = await measure(config, [3.0], Console(quiet=True))
    assert report.goodput_3x is not None and report.goodput_3x >= 0.7  # 3 s of one small worker tell no more
    [phase] = report.phases
    assert phase.refused > 0
    assert phase.failed == 0
    assert phase.sent == phase.in_time + phase.late + phase.refused


@pytest.mark.parametrize("shape", ["prefixes", "cancels", "heavy-tails"])
def test_nothing_is_left_in_a_simulated_mesh(shape: ShapeName) -> None:
    mesh = SimulatedMesh(simulated_of(OverloadConfig(prefill=1, frontends=2)))
    answers = mesh.send(planned(shape, [Segment(20, 5)], 1))
    assert len(answers) == len(planned(shape, [Segment(20, 5)], 1))
    mesh.send(planned("mix", [Segment(0.5, 10)], 2))  # what was under way has ended by now
    for worker in mesh.fleet.workers:
        assert worker.scheduler.num_running == worker.scheduler.num_waiting == 0
        assert worker.pool.held_blocks == 0
    assert [len(state.load) for state in mesh.routers.states] == [0, 0]


def test_a_quantile_of_nothing_is_zero() -> None:
    assert quantile([], 0.5) == 0
    assert quantile([3, 1, 2], 0.5) == 2


def test_a_load_that_is_no_number_is_refused() -> None:
    assert loads_of("1,3,10") == [1, 3, 10]
    for text in ("", "x", "1,,3", "0", "1000"):
        with pytest.raises(ConfigError, match="--load"):
            loads_of(text)
