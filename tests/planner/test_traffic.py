"""Traffic of an interval from the counters of frontends. A missing figure is unknown, never zero."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from kvmesh.mesh.histogram import LoopHistogram
from kvmesh.planner.traffic import (
    Page,
    SloLimits,
    Totals,
    TrafficMeter,
    age_query,
    queries,
    read_page,
    traffic_told,
)
from kvmesh.protocol.errors import WireError

BEGAN_S = 1000.0  # wall clock, when the planner began
OLD, NEW = BEGAN_S - 500, BEGAN_S + 500  # when a frontend started


def page(ended: float = 0, inflight: float = 0, *, started_s: float = OLD, processes: int = 1, **more: float) -> Page:
    return Page(Totals(ended=ended, inflight=inflight, **more), started_s, processes)


def meter(*scrapes: dict[str, Page | None]) -> TrafficMeter:
    """Return a meter that has read these pages, one each second, from second 0 on."""
    one = TrafficMeter(BEGAN_S)
    for at_s, pages in enumerate(scrapes):
        one.on_scrape(float(at_s), pages)
    return one


def requests(one: TrafficMeter, at_s: float) -> float | None:
    traffic = one.close(at_s)
    return None if traffic is None else traffic.requests


# --- one page -----------------------------------------------------------------------------------------


def text_of_a_frontend(inflight: float = 3) -> str:
    registry = CollectorRegistry()
    P = "kvmesh_frontend_"  # noqa: N806
    ended = Counter(P + "requests_total", "", ["endpoint", "outcome"], registry=registry)
    ended.labels("chat", "ok").inc(10)
    ended.labels("chat", "overloaded").inc(2)
    ended.labels("chat", "invalid_request").inc(50)
    ended.labels("embeddings", "ok").inc(1000)
    Gauge(P + "inflight", "", registry=registry).set(inflight)
    isl = LoopHistogram(P + "input_sequence_tokens", "", ["endpoint"], buckets=(1, 10), registry=registry)
    for endpoint, tokens in (("chat", 100), ("completions", 300), ("embeddings", 5000)):
        isl.labels(endpoint).observe(tokens)
    LoopHistogram(P + "ttft_seconds", "", ["endpoint"], buckets=(1,), registry=registry).labels("chat").observe(0.25)
    Counter(P + "cached_tokens_total", "", ["endpoint"], registry=registry).labels("chat").inc(40)
    Gauge("process_start_time_seconds", "", registry=registry).set(77)
    return generate_latest(registry).decode()


def test_a_page_counts_generating_endpoints_and_real_demand() -> None:
    read = read_page(text_of_a_frontend())
    assert read.started_s == 77
    assert read.totals == Totals(
        ended=12, inflight=3, isl_sum=400, isl_count=2, cached_tokens=40, ttft_sum=0.25, ttft_count=1
    )


@pytest.mark.parametrize("text", ["", "hello\n", "kvmesh_frontend_requests_total{ 1\n", "# nothing\nup 1\n"])
def test_a_page_that_is_no_frontends_is_refused(text: str) -> None:
    with pytest.raises(WireError):
        read_page(text)


def test_a_page_with_nan_is_refused() -> None:
    with pytest.raises(WireError, match="no number"):
        read_page(text_of_a_frontend(math.nan))


# --- the interval -------------------------------------------------------------------------------------


def test_arrivals_are_ended_requests_plus_the_growth_in_progress() -> None:
    one = meter({"a": page(100, 5)}, {"a": page(107, 9)})
    assert requests(one, 10.0) == 11


def test_means_cover_the_interval_alone() -> None:
    before = page(100, isl_sum=50_000, isl_count=100, ttft_sum=90, ttft_count=100, itl_sum=1, itl_count=10)
    after = page(
        104, isl_sum=50_800, isl_count=104, osl_sum=60, osl_count=3, cached_tokens=200, ttft_sum=91, ttft_count=104,
        itl_sum=1.2, itl_count=14,
    )  # fmt: skip
    traffic = meter({"a": before}, {"a": after}).close(60.0)
    assert traffic is not None
    assert (traffic.start_s, traffic.end_s, traffic.requests) == (0.0, 60.0, 4)
    assert (traffic.isl_tokens, traffic.osl_tokens, traffic.hit_share) == (200, 20, 0.25)
    assert traffic.ttft_s == pytest.approx(0.25)
    assert traffic.itl_s == pytest.approx(0.05)


def test_an_idle_interval_has_zero_requests_and_unknown_means() -> None:
    traffic = meter({"a": page(7)}, {"a": page(7)}).close(10.0)
    assert traffic is not None
    assert traffic.requests == 0.0
    assert (traffic.isl_tokens, traffic.osl_tokens, traffic.hit_share, traffic.ttft_s, traffic.itl_s) == (None,) * 5


def test_several_frontends_are_added_up() -> None:
    one = meter({"a": page(100), "b": page(10)}, {"a": page(103), "b": page(11, 2)})
    assert requests(one, 10.0) == 6


def test_without_frontends_nothing_is_known() -> None:
    one = meter({}, {})
    assert requests(one, 10.0) is None
    assert one.problem == "there is no frontend"
    assert requests(meter({"a": None}), 10.0) is None


def test_the_loss_of_all_frontends_is_no_idle_interval() -> None:
    one = meter({"a": page(100)}, {})
    assert requests(one, 10.0) is None
    one.on_scrape(11.0, {"a": page(130)})
    assert requests(one, 11.0) == 30


def test_a_silent_frontend_leaves_the_interval_open() -> None:
    one = meter({"a": page(100), "b": page(5)}, {"a": page(103), "b": None})
    assert requests(one, 10.0) is None
    assert "b" in one.problem
    one.on_scrape(12.0, {"a": page(104), "b": page(9)})
    traffic = one.close(12.0)
    assert traffic is not None
    assert (traffic.start_s, traffic.requests) == (0.0, 8)


def test_a_missed_reading_within_an_interval_loses_nothing() -> None:
    assert requests(meter({"a": page(1)}, {"a": None}, {"a": page(4)}), 10.0) == 3


def test_an_interval_open_for_too_long_is_given_up() -> None:
    one = meter({"a": page(100)}, {"a": None})
    one.give_up(100.0, 60.0)
    one.on_scrape(101.0, {"a": page(100_000)})
    assert requests(one, 101.0) is None
    one.on_scrape(111.0, {"a": page(100_002)})
    assert requests(one, 111.0) == 2


def test_a_restarted_frontend_counts_from_zero() -> None:
    one = meter({"a": page(100, 8)}, {"a": page(103, 6)}, {"a": page(2, 1, started_s=NEW)})
    assert requests(one, 10.0) == 1 + 3


def test_a_restart_is_seen_even_if_counters_grew() -> None:
    assert requests(meter({"a": page(3)}, {"a": page(50, started_s=NEW)}), 10.0) == 50


def test_the_death_of_one_process_makes_the_interval_unknown() -> None:
    one = meter({"a": page(100_000, processes=2)}, {"a": page(60_000, started_s=NEW, processes=2)})
    assert requests(one, 10.0) is None
    one.on_scrape(12.0, {"a": page(60_004, started_s=NEW, processes=2)})
    assert requests(one, 12.0) == 4


def test_a_frontend_that_leaves_counts_until_its_last_reading() -> None:
    assert requests(meter({"a": page(5), "b": page(1)}, {"a": page(9), "b": page(1)}, {"b": page(3)}), 10.0) == 6


def test_an_older_frontend_counts_from_its_first_reading() -> None:
    assert (
        requests(meter({"b": page(1)}, {"b": page(1), "a": page(1_000_000)}, {"b": page(1), "a": page(1_000_002)}), 9)
        == 2
    )


def test_a_newer_frontend_counts_from_its_start() -> None:
    assert requests(meter({"b": page(1)}, {"b": page(1), "a": page(7, started_s=NEW)}), 9.0) == 7


def test_a_frontend_that_comes_back_is_not_counted_twice() -> None:
    there, back = page(5, started_s=NEW), page(8, started_s=NEW)
    assert requests(meter({"a": there, "b": page()}, {"b": page()}, {"a": back, "b": page()}), 9.0) == 3


def test_an_interval_without_length_is_none() -> None:
    assert requests(meter({"a": page(5)}), 0.0) is None


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=2, max_size=30),
    st.sets(st.integers(1, 28), max_size=5),
)
def test_intervals_of_any_length_add_up_to_the_arrivals(steps: list[tuple[int, int]], cuts: set[int]) -> None:
    """Read one second for each of `steps`: requests that arrived, and requests in progress that ended."""
    one, told, arrived, ended = TrafficMeter(BEGAN_S), 0.0, 0, 0
    one.on_scrape(0.0, {"a": page(0, 0)})
    for at_s, (come, done) in enumerate(steps, 1):
        arrived += come
        ended = min(arrived, ended + done)
        one.on_scrape(float(at_s), {"a": page(ended, arrived - ended)})
        if at_s in cuts or at_s == len(steps):
            told += requests(one, float(at_s)) or 0.0
    assert told == arrived


# --- a Prometheus server ------------------------------------------------------------------------------


def test_every_query_has_the_labels_of_the_frontends() -> None:
    asked = queries('job="fe"', 60, SloLimits(0.3, 100.0))
    assert asked["ttft_within"].startswith(
        '0.8 * sum(increase(kvmesh_frontend_ttft_seconds_bucket{job="fe",le=~"0.25|0.25"'
    )
    assert " + 0.2 * sum(increase(" in asked["ttft_within"] and 'le=~"2.5|2.5"' in asked["itl_within"]
    assert set(queries('job="fe"', 60)) == set(asked) - {"ttft_within", "itl_within"}
    assert set(asked) == set(Totals.__dataclass_fields__)
    assert all('job="fe"' in query and "[60s]" in query for query in asked.values())
    assert 'outcome!~"' in asked["ended"]
    assert asked["inflight"] == 'sum(delta(kvmesh_frontend_inflight{job="fe"}[60s]))'
    assert age_query("") == "time() - max(timestamp(kvmesh_frontend_inflight{}))"


def test_answers_become_traffic() -> None:
    said: dict[str, float | None] = dict.fromkeys(Totals.__dataclass_fields__)
    traffic = traffic_told(said | {"ended": 30.0, "inflight": 2.0, "isl_sum": 300.0, "isl_count": 30.0}, 0.0, 60.0)
    assert traffic is not None
    assert (traffic.requests, traffic.isl_tokens, traffic.ttft_s) == (32.0, 10.0, None)


def test_without_the_inflight_gauge_nothing_is_known() -> None:
    assert traffic_told({"ended": 30.0, "inflight": None}, 0.0, 60.0) is None


def test_an_answer_that_is_not_a_number_is_unknown() -> None:
    assert traffic_told({"ended": math.nan, "inflight": 1.0}, 0.0, 60.0) is None
