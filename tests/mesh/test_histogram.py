"""Histograms of the event loop look to Prometheus like any other."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from kvmesh.mesh.histogram import LoopHistogram

BOUNDS = (0.1, 1.0, 2.5, 10.0)
VALUES = st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 100)), max_size=30)


def shown(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(chat=VALUES, embeddings=VALUES)
def test_it_tells_what_prometheus_own_histogram_would(chat: list[float], embeddings: list[float]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    expected = Histogram("waits", "Waits.", ["endpoint"], buckets=BOUNDS, registry=theirs)
    told = LoopHistogram("waits", "Waits.", ["endpoint"], buckets=BOUNDS, registry=ours)
    for endpoint, values in (("chat", chat), ("embeddings", embeddings)):
        for value in values:
            expected.labels(endpoint).observe(value)
            told.labels(endpoint).observe(value)
        expected.labels(endpoint)
        told.labels(endpoint)
    assert shown(ours) == shown(theirs)


def test_without_labels_it_is_told_before_anything_was_observed() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    Histogram("waits", "Waits.", buckets=BOUNDS, registry=theirs)
    LoopHistogram("waits", "Waits.", buckets=BOUNDS, registry=ours)
    assert shown(ours) == shown(theirs)


def test_labels_of_the_wrong_number_are_refused() -> None:
    with pytest.raises(ValueError, match="endpoint"):
        LoopHistogram("waits", "Waits.", ["endpoint"], buckets=BOUNDS, registry=CollectorRegistry()).labels()


def test_two_of_one_name_are_refused() -> None:
    registry = CollectorRegistry()
    LoopHistogram("waits", "Waits.", buckets=BOUNDS, registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        LoopHistogram("waits", "Waits.", buckets=BOUNDS, registry=registry)


def test_values_above_all_bounds_count_in_the_last_bucket() -> None:
    registry = CollectorRegistry()
    LoopHistogram("waits", "Waits.", buckets=BOUNDS, registry=registry).labels().observe(math.inf)
    assert registry.get_sample_value("waits_bucket", {"le": "10.0"}) == 0
    assert registry.get_sample_value("waits_bucket", {"le": "+Inf"}) == 1


def test_a_bucket_names_the_last_trace_alone() -> None:
    registry = CollectorRegistry()
    waits = LoopHistogram("waits", "Waits.", buckets=BOUNDS, registry=registry).labels()
    for number, value in enumerate((0.5, 0.7, 0.7, 99.0)):
        waits.observe(value)
        waits.exemplify(value, f"{number:032x}", 1000.0 + number)
    samples = [sample for family in registry.collect() for sample in family.samples]
    named = {sample.labels["le"]: sample.exemplar for sample in samples if sample.exemplar is not None}
    assert {edge: (found.labels["trace_id"][-1], found.value) for edge, found in named.items()} == {
        "1.0": ("2", 0.7), "+Inf": ("3", 99.0),
    }  # fmt: skip
    assert "# {" not in generate_latest(registry).decode()
