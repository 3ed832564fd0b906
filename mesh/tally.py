"""Counters and gauges that are counted on the event loop alone: plain numbers, for what every request counts.

As mesh/histogram.py: prometheus_client's own take a lock for each.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class Tally:
    """Of one set of label values. Not for use by several threads."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class _Tallies(Collector):
    """One metric of the default registry."""

    _family: type[CounterMetricFamily] | type[GaugeMetricFamily]

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str] = (), *, registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._children: dict[tuple[str, ...], Tally] = {}
        if not self._labels:  # it is told from the start
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Tally:
        """Made when it is first asked for."""
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {self._labels}, not {len(values)}")
        if (child := self._children.get(values)) is None:
            child = self._children[values] = Tally()
        return child

    def collect(self) -> Iterator[Metric]:
        family = self._empty()
        for values, child in list(self._children.items()):
            family.add_metric(values, child.value)
        yield family

    def describe(self) -> Iterator[Metric]:
        """For the registry, which refuses a second metric of the same name."""
        yield self._empty()

    def _empty(self) -> CounterMetricFamily | GaugeMetricFamily:
        return self._family(self._name, self._documentation, labels=self._labels)


class LoopCounter(_Tallies):
    """A counter; its name ends with `_total`."""

    _family = CounterMetricFamily


class LoopGauge(_Tallies):
    """A gauge that goes up and down by steps."""

    _family = GaugeMetricFamily
