"""The list of metrics: what is written from it is current, and producers cannot leave it."""

import re
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from kvmesh.lab.observability.write import ROOT, outdated
from kvmesh.mesh.measure import AtScrape, Reading, bounded, counter, gauge
from kvmesh.mesh.metric_list import DECLARED, GROUPS, LABELS, OTHER, metric_of
from tests.test_import_order import MAY_USE

MADE = """
import kvmesh.frontend.service, kvmesh.frontend.picker.service, kvmesh.frontend.gen_ai, kvmesh.planner.service
import kvmesh.router.service, kvmesh.workers.service
import kvmesh.workers.engines.torch.metrics, kvmesh.workers.memory.metrics
from prometheus_client import REGISTRY
kvmesh.frontend.gen_ai.gen_ai_metrics()
for family in REGISTRY.collect():
    print(family.name)
"""


def test_generated_files_are_what_the_list_says() -> None:
    assert outdated() == [], "run `kvmesh lab metrics-docs`"


def test_every_metric_that_a_service_makes_is_declared_and_the_other_way_round() -> None:
    listed = subprocess.run([sys.executable, "-c", MADE], capture_output=True, text=True, check=True)
    made = {metric_of(name) for name in listed.stdout.split()}
    assert None not in made
    assert {metric.name for metric in DECLARED.values() if metric not in made} == {"kvmesh_build_info"}


def test_producers_make_their_metrics_by_name() -> None:
    """One that makes its own is not in the docs, and has no labels of its process."""
    made = re.compile(r"from prometheus_client import .*\b(Counter|Gauge|Histogram|Summary|Info)\b")
    files = (file for package in MAY_USE for file in (ROOT / package).rglob("*.py"))
    users = {str(file.relative_to(ROOT)) for file in files if made.search(file.read_text(encoding="utf-8"))}
    assert users == {"mesh/measure.py"}, "declare it in mesh/metric_list.py, and make it with mesh/measure.py"


def test_each_name_is_declared_once_and_each_label_explained() -> None:
    metrics = [metric for group in GROUPS for metric in group.metrics]
    assert len(metrics) == len(DECLARED)
    assert {label for metric in metrics for label in metric.labels} <= set(LABELS)


def test_names_say_what_prometheus_expects() -> None:
    for metric in DECLARED.values():
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith(".")


@pytest.mark.parametrize("name", ["kvmesh_router_nonsense", "kvmesh_frontend_requests_total"])
def test_a_metric_that_is_not_in_the_list_cannot_be_made(name: str) -> None:
    with pytest.raises(ValueError, match="declare it there"):
        gauge(name, CollectorRegistry())


def test_labels_of_a_metric_are_those_of_the_list() -> None:
    made = counter("kvmesh_frontend_requests_total", CollectorRegistry())
    with pytest.raises(ValueError, match="outcome"):
        made.labels("chat", "ok")


def test_a_bounded_label_ends_in_other() -> None:
    most = LABELS["model"].most
    values = [bounded("model", f"bounded-{number}") for number in range(most + 5)]
    assert OTHER in values
    assert len(set(values)) <= most + 1
    assert bounded("model", values[0]) == values[0], "a value that is known stays"


def test_what_is_read_at_a_scrape_is_read_then_and_only_then() -> None:
    registry, asked = CollectorRegistry(), []

    def read() -> list[Reading]:
        asked.append(1)
        return [Reading("kvmesh_router_workers", ("m", "decode"), 3)]

    scraped = AtScrape(["kvmesh_router_workers"], registry)
    scraped.read("router", read)
    assert asked == []
    assert registry.get_sample_value("kvmesh_router_workers", {"model": "m", "role": "decode"}) == 3
    scraped.forget("router")
    assert registry.get_sample_value("kvmesh_router_workers", {"model": "m", "role": "decode"}) is None
    assert len(asked) == 1
