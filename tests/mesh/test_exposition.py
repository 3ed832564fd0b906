"""The labels that all metrics of a process share are added when Prometheus asks."""

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvmesh.mesh.exposition import labelled, open_page, page, wants_open_metrics
from kvmesh.mesh.measure import AtScrape, Reading, gauge, histogram


def registry_with_a_request() -> CollectorRegistry:
    registry = CollectorRegistry()
    gauge("kvmesh_frontend_inflight", registry).labels().inc()
    return registry


def test_a_service_labels_its_metrics_while_it_runs() -> None:
    registry = registry_with_a_request()
    with labelled("frontend", "mine"):
        text = page(registry).decode()
        assert 'kvmesh_frontend_inflight{component="frontend",namespace="mine"} 1.0' in text
        assert "kvmesh_build_info{" in text
    assert "kvmesh_frontend_inflight 1.0" in page(registry).decode()


def test_labels_without_a_value_are_left_out_and_others_are_asked_for_at_each_scrape() -> None:
    registry, role = registry_with_a_request(), ["prefill"]
    with labelled("worker", "", lambda: {"role": role[0], "model": ""}):
        assert 'inflight{component="worker",role="prefill"} 1.0' in page(registry).decode()
        role[0] = "decode"
        assert 'inflight{component="worker",role="decode"} 1.0' in page(registry).decode()


def test_a_label_of_the_metric_itself_stays() -> None:
    registry = CollectorRegistry()
    loads = AtScrape(["kvmesh_worker_kv_offers"], registry)
    loads.read("a", lambda: [Reading("kvmesh_worker_kv_offers", ("a", "m", "decode"), 2)])
    with labelled("worker", "", lambda: {"role": "mixed"}):
        assert 'kv_offers{component="worker",model="m",role="decode",worker="a"} 2.0' in page(registry).decode()


def test_an_engines_metrics_pass_as_they_are() -> None:
    class Engine:
        def collect(self) -> list[GaugeMetricFamily]:
            return [GaugeMetricFamily("vllm:num_requests_running", "Running.", value=4)]

    registry = CollectorRegistry()
    registry.register(Engine())
    Counter("sglang:requests_total", "Requests.", registry=registry).inc(3)
    with labelled("worker", "mine"):
        text = page(registry).decode()
    assert "vllm:num_requests_running 4.0" in text
    assert "sglang:requests_total 3.0" in text


PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        (PROMETHEUS, True),
        ("application/openmetrics-text", True),
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4,application/openmetrics-text;q=0.5", False),
        ("application/openmetrics-text;version=7.0.0", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=much", False),
    ],
)
def test_open_metrics_are_for_those_who_prefer_them(accept: str, is_open: bool) -> None:
    assert wants_open_metrics(accept) == is_open


def test_open_metrics_have_the_labels_and_the_traces() -> None:
    registry = CollectorRegistry()
    waits = histogram("kvmesh_frontend_ttft_seconds", registry).labels("chat", "m")
    waits.observe(0.003)
    waits.exemplify(0.003, "a" * 32, 5.0)
    with labelled("frontend", "mine"):
        families = list(text_string_to_metric_families(open_page(registry).decode()))
    (sample,) = [one for family in families for one in family.samples if one.exemplar]
    assert sample.labels["component"] == "frontend"
    assert (sample.exemplar.labels, sample.exemplar.value) == ({"trace_id": "a" * 32}, 0.003)
