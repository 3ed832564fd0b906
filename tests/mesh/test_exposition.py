"""The labels that all metrics of a process share are added when Prometheus asks."""

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily

from mesh.exposition import labelled, page
from mesh.measure import AtScrape, Reading, gauge


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
