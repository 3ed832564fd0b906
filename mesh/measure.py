"""Make metrics by name: kind, labels, buckets and help come from mesh/metric_list.py.

Counters, gauges and histograms of the event loop cost a tenth of prometheus_client's, and are not safe to use from
several threads; the `locked` ones are. What costs something to find out is read when Prometheus asks (AtScrape).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvmesh.mesh.histogram import LoopHistogram
from kvmesh.mesh.metric_list import LABELS, OTHER, declared
from kvmesh.mesh.tally import LoopCounter, LoopGauge


def counter(name: str, registry: CollectorRegistry = REGISTRY) -> LoopCounter:
    """Return a new counter of the event loop."""
    metric = declared(name, "counter")
    return LoopCounter(name, metric.help, metric.labels, registry=registry)


def gauge(name: str, registry: CollectorRegistry = REGISTRY) -> LoopGauge:
    """Return a new gauge of the event loop, which is increased and decreased by steps."""
    metric = declared(name, "gauge")
    return LoopGauge(name, metric.help, metric.labels, registry=registry)


def histogram(name: str, registry: CollectorRegistry = REGISTRY) -> LoopHistogram:
    """Return a new histogram of the event loop."""
    metric = declared(name, "histogram")
    return LoopHistogram(name, metric.help, metric.labels, buckets=metric.buckets, registry=registry)


def locked_counter(name: str, registry: CollectorRegistry = REGISTRY) -> Counter:
    """Return a new counter that threads share."""
    metric = declared(name, "counter")
    return Counter(name, metric.help, metric.labels, registry=registry)


def locked_gauge(name: str, registry: CollectorRegistry = REGISTRY) -> Gauge:
    """Return a new gauge that is set, by any thread, or read by a function at a scrape."""
    metric = declared(name, "gauge")
    return Gauge(name, metric.help, metric.labels, registry=registry)


def locked_histogram(name: str, registry: CollectorRegistry = REGISTRY) -> Histogram:
    """Return a new histogram that threads share."""
    metric = declared(name, "histogram")
    return Histogram(name, metric.help, metric.labels, buckets=metric.buckets, registry=registry)


class Reading(NamedTuple):
    """One sample of a metric that is read at a scrape."""

    name: str
    labels: tuple[str, ...]  # values, in the order of the list
    value: float


Source = Callable[[], Iterable[Reading]]


class AtScrape(Collector):
    """Counters and gauges that are read when Prometheus asks, perhaps on another thread, and cost nothing else."""

    def __init__(self, names: Sequence[str], registry: CollectorRegistry = REGISTRY) -> None:
        self._metrics = [declared(name, "counter" if name.endswith("_total") else "gauge") for name in names]
        self._sources: dict[str, Source] = {}
        registry.register(self)

    def read(self, owner: str, source: Source) -> None:
        """Read `source` at every scrape. It replaces an earlier one of the same owner."""
        self._sources[owner] = source

    def forget(self, owner: str) -> None:
        self._sources.pop(owner, None)

    def describe(self) -> Iterator[Metric]:
        """Name the metrics for the registry, which refuses a second metric of the same name."""
        yield from self._families().values()

    def collect(self) -> Iterator[Metric]:
        families = self._families()
        for source in list(self._sources.values()):
            for reading in source():
                families[reading.name].add_metric(reading.labels, reading.value)
        yield from families.values()

    def _families(self) -> dict[str, CounterMetricFamily | GaugeMetricFamily]:
        return {
            metric.name: (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
                metric.name, metric.help, labels=metric.labels
            )
            for metric in self._metrics
        }


_known: dict[str, set[str]] = {}


def bounded(label: str, value: str) -> str:
    """Return a value for a label of which this process may have so many. Beyond that it is `other`."""
    known = _known.setdefault(label, set())
    if value in known:
        return value
    if len(known) >= LABELS[label].most:
        return OTHER
    known.add(value)
    return value
