"""Metrics of several processes, merged as if they were one."""

import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.mesh.measure import histogram
from kvmesh.mesh.merged_metrics import exemplars_of, merge, merge_open

NAMES = """
import kvmesh.frontend.service, kvmesh.frontend.picker.metrics
from kvmesh.mesh.metric_list import metric_of
from prometheus_client import REGISTRY
for family in REGISTRY.collect():
    if family.type == "gauge":
        print(family.name, metric_of(family.name) and metric_of(family.name).together)
"""


def merged(*texts: str) -> dict[str, float]:
    families = text_string_to_metric_families(merge(texts))
    return {sample.name: sample.value for family in families for sample in family.samples}


def of(kind: str, name: str, value: float) -> str:
    return f"# HELP {name} Words.\n# TYPE {name} {kind}\n{name} {value}\n"


@pytest.mark.parametrize(("name", "value"), [("kvmesh_frontend_inflight", 11.0), ("kvmesh_router_workers", 8.0)])
def test_a_gauge_is_merged_as_it_is_declared(name: str, value: float) -> None:
    assert merged(of("gauge", name, 8), of("gauge", name, 3)) == {name: value}


def test_counters_are_added_and_their_start_is_not() -> None:
    texts = [of("counter", "asked_total", n) + of("gauge", "asked_created", 1000 + n) for n in (3, 4)]
    assert merged(*texts) == {"asked_total": 7, "asked_created": 1004}


def test_histograms_are_added() -> None:
    text = (
        "# HELP wait Words.\n# TYPE wait histogram\n"
        'wait_bucket{le="1.0"} 2\nwait_bucket{le="+Inf"} 3\nwait_count 3\nwait_sum 7\n'
    )
    assert merged(text, text) == {"wait_bucket": 6, "wait_count": 6, "wait_sum": 14}


def test_open_metrics_of_several_processes_have_the_traces_of_one() -> None:
    registry = CollectorRegistry()
    waits = histogram("kvmesh_frontend_ttft_seconds", registry).labels("chat", "m")
    waits.observe(0.003)
    waits.exemplify(0.003, "a" * 32, 5.0)
    Counter("asked", "Words.", registry=registry).inc()  # it says when it began
    text = generate_latest(registry).decode()
    families = list(open_families(merge_open([text, text], exemplars_of(registry))))
    named = [sample for family in families for sample in family.samples if sample.exemplar]
    assert [(sample.value, sample.exemplar.labels["trace_id"]) for sample in named] == [(2.0, "a" * 32)]
    assert [sample.value for family in families for sample in family.samples if sample.name == "asked_total"] == [2.0]


def test_every_gauge_of_a_frontend_says_how_it_is_merged() -> None:
    """A gauge that says nothing would be added up: 16 workers for 8."""
    listed = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=True)
    rules = dict(line.split() for line in listed.stdout.splitlines())
    assert rules["kvmesh_router_workers"] == "alike"
    assert [name for name, rule in rules.items() if rule == "None"] == []
