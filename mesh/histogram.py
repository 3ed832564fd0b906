"""Histograms that are counted on the event loop alone: plain numbers, made into Prometheus' when it asks.

prometheus_client's own take a lock for every bucket and sum, which at half a dozen observations per request costs more
than tokenizing the prompt.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Distribution:
    """Of one set of label values. Not for use by several threads."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # between the bounds; the last: above all of them
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class LoopHistogram(Collector):
    """A histogram of the default registry. `buckets`: upper bounds, ascending; +Inf is added."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._bounds = tuple(buckets)
        self._children: dict[tuple[str, ...], Distribution] = {}
        if not self._labels:  # it is told from the start
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Distribution:
        """Made when it is first asked for."""
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {self._labels}, not {len(values)}")
        if (child := self._children.get(values)) is None:
            child = self._children[values] = Distribution(self._bounds)
        return child

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        edges = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, child in list(self._children.items()):
            cumulated = accumulate(child.counts)
            family.add_metric(values, list(zip(edges, cumulated, strict=True)), child.total)
        yield family

    def describe(self) -> Iterator[Metric]:
        """For the registry, which refuses a second metric of the same name."""
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
