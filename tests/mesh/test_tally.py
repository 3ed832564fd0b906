"""Counters and gauges of plain numbers: Prometheus sees them as it sees its own."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from kvmesh.mesh.tally import LoopCounter, LoopGauge


def lines(registry: CollectorRegistry) -> list[str]:
    """Return the samples without the creation time, which plain numbers do not have."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_a_counter_is_written_as_prometheus_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    for counter in (
        LoopCounter("asked_total", "Asked.", ["who"], registry=ours),
        Counter("asked_total", "Asked.", ["who"], registry=theirs),
    ):
        counter.labels("a").inc()
        counter.labels("b").inc(3)
        counter.labels("a").inc()
    assert lines(ours) == lines(theirs)


def test_a_gauge_is_written_as_prometheus_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    LoopGauge("running", "Running.", registry=ours).labels().inc(2)
    Gauge("running", "Running.", registry=theirs).inc(2)
    assert lines(ours) == lines(theirs)


def test_without_labels_it_is_told_from_the_start() -> None:
    registry = CollectorRegistry()
    LoopCounter("asked_total", "Asked.", registry=registry)
    assert registry.get_sample_value("asked_total") == 0.0


def test_labels_are_as_many_as_were_named() -> None:
    with pytest.raises(ValueError, match="asked_total has the labels"):
        LoopCounter("asked_total", "Asked.", ["who"], registry=CollectorRegistry()).labels()


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    LoopCounter("asked_total", "Asked.", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        LoopGauge("asked", "Asked.", registry=registry)
