"""The demo of the planner: its load, its judgement, its page."""

import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from kvmesh.lab.demo_planner import DemoPlannerConfig, DemoRequest, arrivals, judge, quantile, rate_at, take_chunk
from kvmesh.lab.demo_planner_page import Event, Point, Report, page, write_png
from kvmesh.planner.connectors.connector import Applied
from kvmesh.planner.model import Action, Flip, Reason, ScalingDecision
from kvmesh.planner.record import Record
from kvmesh.protocol.errors import EngineError

CONFIG = DemoPlannerConfig(seconds=100.0, low_rps=4.0, times=3.0)


def point(at_s: float, prefill: int = 1, decode: int = 1, there: int | None = None) -> Point:
    return Point(
        at_s=at_s, offered_rps=4.0, prefill_ready=prefill, decode_ready=decode, prefill_all=prefill,
        decode_all=decode if there is None else there,
    )  # fmt: skip


def sent(at_s: float = 1.0, ttft_s: float | None = 0.1, failure: str = "") -> DemoRequest:
    return DemoRequest(at_s, ttft_s=ttft_s, last_s=at_s + (ttft_s or 0) + 31 * 0.05, tokens=32, failure=failure)


def record(ts_s: float, flip: Flip | None = None) -> Record:
    decision = ScalingDecision(
        at_s=0.0, loop="reactive", action=Action.SCALE, prefill=1, decode=3, flip=flip,
        reasons=(Reason(code="x", text="more < less & so on"),),
    )  # fmt: skip
    return Record(
        ts_s=ts_s, planner="p", mode="active", connector="local", observation=None, decision=decision,
        applied=Applied(prefill=1, decode=3),
    )  # fmt: skip


FOLLOWED = [point(0), point(1, 2, 4), point(2, 1, 2)]


def report(**changes: object) -> Report:
    made = judge(CONFIG, [sent(), sent(2.0, ttft_s=3.0)], FOLLOWED, [record(90.0), record(105.0)], 100.0)
    return msgspec.structs.replace(made, **changes)


# --- the load -----------------------------------------------------------------------------------------


def test_the_load_triples_and_falls() -> None:
    assert (rate_at(CONFIG, 0.0), rate_at(CONFIG, 35.0), rate_at(CONFIG, 99.0)) == (4.0, 12.0, 4.0)
    assert 4.0 < rate_at(CONFIG, 23.0) < 12.0
    assert (rate_at(CONFIG, 49.0), rate_at(CONFIG, 51.0), rate_at(CONFIG, 54.0)) == (4.0, 12.0, 4.0)


def test_arrivals_keep_the_rate_and_repeat_with_the_seed() -> None:
    times = arrivals(CONFIG)
    assert times == sorted(times) == arrivals(CONFIG)
    assert times != arrivals(msgspec.structs.replace(CONFIG, seed=2))
    low, peak = (sum(left <= at_s < left + 12 for at_s in times) for left in (0, 30))
    assert 1.8 < peak / low < 5
    assert len(times) == pytest.approx(sum(rate_at(CONFIG, n + 0.5) for n in range(100)), rel=0.15)


def test_an_answer_is_timed_by_its_chunks() -> None:
    one = DemoRequest(10.0)
    take_chunk(one, {"choices": [{"text": "a"}]}, 10.25)
    take_chunk(one, {"choices": [{"text": "b"}]}, 11.25)
    take_chunk(one, {"choices": [], "usage": {"completion_tokens": 11}}, 11.5)
    assert (one.ttft_s, one.itl_s) == (0.25, pytest.approx(0.1))
    with pytest.raises(EngineError):
        take_chunk(one, {"error": {"message": "no"}}, 12.0)


def test_a_request_keeps_the_slo_by_ttft_and_itl() -> None:
    assert sent().keeps(0.1, 0.051)
    assert not sent().keeps(0.09, 0.051)
    assert not sent().keeps(0.1, 0.049)
    assert not sent(failure="status 500").keeps(9, 9)
    assert not DemoRequest(0.0).keeps(9, 9)


# --- the judgement ------------------------------------------------------------------------------------


def test_a_demo_without_failures_whose_workers_follow_is_ok() -> None:
    told = report()
    assert (told.ok, told.problems, told.failed, told.attainment) == (True, [], 0, 0.5)
    assert (told.workers_at_start, told.workers_at_peak, told.workers_at_end) == (2, 6, 3)
    assert [event.at_s for event in told.events] == [5.0], "what was decided before the load began is left out"
    assert told.worker_hours == pytest.approx(11 / 3600)


def test_a_failed_request_is_a_problem() -> None:
    told = judge(CONFIG, [sent(), sent(failure="status 503")], FOLLOWED, [], 0.0)
    assert not told.ok
    assert "1 of 2 requests failed: status 503" in told.problems[0]


def test_workers_that_do_not_follow_are_a_problem() -> None:
    never = judge(CONFIG, [sent()], [point(0), point(1), point(2)], [], 0.0)
    assert any("never more" in problem for problem in never.problems)
    stay = judge(CONFIG, [sent()], [point(0), point(1, 2, 4), point(2, 2, 4)], [], 0.0)
    assert any("did not become fewer" in problem for problem in stay.problems)


def test_workers_that_are_ordered_for_the_burst_are_a_problem() -> None:
    """The workers of the peak are still there: that is enough."""
    kept = [point(0), point(40, 2, 4), point(50, 2, 4), point(53, 2, 4), point(99)]
    covered = judge(CONFIG, [sent()], kept, [], 0.0)
    assert covered.ok and (covered.burst.found, covered.burst.ordered) == (6, 0)
    chased = judge(CONFIG, [sent()], [point(0), point(40), point(50), point(53, 1, 3), point(99)], [], 0.0)
    assert chased.burst.ordered == 2
    assert any("2 workers were ordered for a burst of 3 s" in problem for problem in chased.problems)


def test_flips_are_counted() -> None:
    flip = Flip(to_role="decode", count=1)
    assert judge(CONFIG, [sent()], FOLLOWED, [record(1.0, flip), record(2.0)], 0.0).flips == 1


def test_a_quantile_of_nothing_is_no_number() -> None:
    assert quantile([None, 3.0, 1.0], 0.5) == 3.0
    assert str(quantile([None], 0.5)) == "nan"


# --- the page -----------------------------------------------------------------------------------------


def test_the_page_needs_nothing_but_itself() -> None:
    text = page(report())
    assert re.findall(r"(?:src|href|url)\s*[=(]", text) == []
    assert "http" not in text
    assert "50.0%" in text
    assert "more &lt; less &amp; so on" in text


def test_its_charts_are_drawn() -> None:
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page(report()), re.S)]
    assert len(charts) == 4
    assert len(charts[1].findall("path")) == 2, "a line for each role"
    assert len(charts[2].findall("circle")) == 2, "a dot for each request"


def test_a_demo_without_any_event_has_a_page() -> None:
    assert "<svg" in page(report(points=[], ttft_s=[], itl_s=[], events=[]))


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_png(tmp_path / "x.png", report(events=[Event(at_s=1.0, prefill=1, decode=2, text="x")]))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
