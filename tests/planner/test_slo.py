"""SLOs as users state them, how they are judged, and what they set."""

import math

import pytest

from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.metrics import SLO_KEPT, SLO_SHARE, show_slo
from kvmesh.planner.model import SloCounts, Traffic
from kvmesh.planner.service import planned_with
from kvmesh.planner.slo import BUDGET_PRICE, SloWatch, read_statement, read_statements, sentence_of, with_slo
from kvmesh.planner.traffic import SloLimits, TrafficMeter, read_page, within
from kvmesh.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "of", "share", "limit_s", "window_s"),
    [
        ("p95 TTFT <= 0.5 s over 5 min", "ttft", 0.95, 0.5, 300.0),
        ("P99.9 itl<=20ms over 1 h", "itl", 0.999, 0.02, 3600.0),
        (" p50 ttft <= 2s ", "ttft", 0.5, 2.0, 300.0),
    ],
)
def test_a_statement_is_read_with_its_units(text: str, of: str, share: float, limit_s: float, window_s: float) -> None:
    found = read_statement(text)
    assert (found.of, found.window_s) == (of, window_s)
    assert (found.share, found.limit_s) == pytest.approx((share, limit_s))
    assert read_statement(found.text) == found


@pytest.mark.parametrize(
    "text", ["", "p95", "p95 e2e <= 1 s", "p95 ttft >= 1 s", "p95 ttft <= 1", "p95 ttft <= 1 s over"]
)
def test_what_is_no_statement_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="for example 'p95 TTFT"):
        read_statement(text)


@pytest.mark.parametrize("text", ["p100 ttft <= 1 s", "p0 ttft <= 1 s", "p95 ttft <= 0 s", "p95 itl <= 1 s over 2 ms"])
def test_what_nobody_can_judge_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be judged"):
        read_statement(text)


def test_two_statements_of_one_time_are_refused() -> None:
    with pytest.raises(ConfigError, match="several SLOs of one time"):
        read_statements(["p95 ttft <= 1 s", "p50 ttft <= 0.5 s"])


def test_statements_set_the_limits_and_a_target_sets_the_price() -> None:
    texts = ("p95 ttft <= 2 s", "p99 itl <= 40 ms")
    config = planned_with(ServiceConfig(slo=texts, aim="target", connector="local"))
    assert (config.ttft_slo_s, config.itl_slo_s) == pytest.approx((2.0, 0.04))
    assert config.miss_cost == pytest.approx(100)
    assert with_slo(ServiceConfig(miss_cost=7.0), texts, "price").miss_cost == 7.0
    assert with_slo(ServiceConfig(), (), "budget").miss_cost == BUDGET_PRICE
    with pytest.raises(ConfigError, match="a target needs an SLO"):
        planned_with(ServiceConfig(aim="target"))


def piece(end_s: float, ttft: float, ttft_within: float) -> Traffic:
    counts = SloCounts(ttft=ttft, ttft_within=ttft_within, itl=ttft, itl_within=ttft)
    return Traffic(start_s=end_s - 10, end_s=end_s, requests=ttft, slo_counts=counts)


def test_a_window_is_judged_by_the_share_of_its_requests() -> None:
    watch = SloWatch(read_statements(["p90 ttft <= 1 s over 20 s", "p99 itl <= 1 s over 20 s"]))
    watch.hear(piece(10, 100, 50))
    ttft, itl = watch.states(10)
    assert (ttft.share, ttft.is_kept, itl.share, itl.is_kept) == (0.5, False, 1.0, True)
    assert "MISSED, 50.0% of 100 requests" in sentence_of(ttft)
    watch.hear(piece(20, 100, 100))
    watch.hear(piece(30, 100, 90))
    ttft, _ = watch.states(30)
    assert (ttft.share, ttft.requests, ttft.is_kept) == (0.95, 200, True)


def test_few_requests_and_an_outage_leave_it_open() -> None:
    watch = SloWatch(read_statements(["p90 ttft <= 1 s over 20 s"]))
    watch.hear(None)
    watch.hear(piece(10, 19, 0))
    (state,) = watch.states(10)
    assert state.share is state.is_kept is None
    assert "not known" in sentence_of(state)
    watch.hear(piece(20, 100, 100))
    assert watch.states(41)[0].requests == 0, "the window is empty: nothing was heard for so long"


def test_the_metrics_show_what_is_kept() -> None:
    watch = SloWatch(read_statements(["p90 ttft <= 1 s over 20 s", "p90 itl <= 1 s over 20 s"]))
    show_slo(watch.states(0))
    assert math.isnan(SLO_SHARE.labels("ttft")._value.get())
    watch.hear(piece(10, 100, 50))
    show_slo(watch.states(10))
    assert (SLO_SHARE.labels("ttft")._value.get(), SLO_KEPT.labels("ttft")._value.get()) == (0.5, 0)
    assert SLO_KEPT.labels("itl")._value.get() == 1


def test_counts_between_two_bounds_are_interpolated() -> None:
    buckets = {0.1: 10.0, 0.5: 50.0, math.inf: 60.0}
    assert [within(buckets, at_s) for at_s in (0.05, 0.1, 0.3, 0.5, 7.0)] == pytest.approx([5, 10, 30, 50, 50])
    assert within({}, 1.0) == 0


PAGE = """
kvmesh_frontend_inflight 0
kvmesh_frontend_requests_total{outcome="ok",endpoint="chat"} 30
kvmesh_frontend_ttft_seconds_bucket{endpoint="chat",model="a",le="0.5"} 8
kvmesh_frontend_ttft_seconds_bucket{endpoint="chat",model="a",le="+Inf"} 10
kvmesh_frontend_ttft_seconds_bucket{endpoint="chat",model="b",le="0.5"} 19
kvmesh_frontend_ttft_seconds_bucket{endpoint="chat",model="b",le="+Inf"} 20
kvmesh_frontend_ttft_seconds_count{endpoint="chat",model="a"} 10
kvmesh_frontend_ttft_seconds_count{endpoint="chat",model="b"} 20
process_start_time_seconds 2.0
"""


def test_a_frontends_page_says_how_many_kept_the_limit() -> None:
    page = read_page(PAGE, 1, SloLimits(0.5, 0.05))
    assert (page.totals.ttft_count, page.totals.ttft_within) == (30, 27)
    meter = TrafficMeter(1.0, counts_slo=True)
    meter.on_scrape(10.0, {"f": page})
    meter.on_scrape(20.0, {"f": page})
    traffic = meter.close(20.0)
    assert traffic is not None and traffic.slo_counts is not None
    assert (traffic.slo_counts.ttft, traffic.slo_counts.ttft_within) == (0, 0)


def test_without_an_slo_nothing_is_counted() -> None:
    meter = TrafficMeter(1.0)
    meter.on_scrape(10.0, {"f": read_page(PAGE)})
    meter.on_scrape(20.0, {"f": read_page(PAGE)})
    traffic = meter.close(20.0)
    assert traffic is not None and traffic.slo_counts is None
