"""Count on the event loop alone: plain numbers, which become Prometheus metrics when Prometheus asks.

prometheus_client's own metrics take a lock for each number. With half a dozen per request, that costs more than
tokenizing the prompt. mesh/histogram.py has the histograms.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

Child = TypeVar("Child")
Family = TypeVar("Family", bound=Metric)


class LoopMetric(Collector, Generic[Child, Family]):
    """A metric with a child for each set of label values. It is registered when it is made."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str] = (), *, registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._children: dict[tuple[str, ...], Child] = {}
        if not self._labels:  # it is exported from the start
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Child:
        """Return the child of these label values. It is made at the first call."""
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {self._labels}, not {len(values)}")
        if (child := self._children.get(values)) is None:
            child = self._children[values] = self._new_child()
        return child

    def children(self) -> list[tuple[tuple[str, ...], Child]]:
        """Return the label values of each child, and the child."""
        return list(self._children.items())

    def forget(self, value: str) -> None:
        """Remove the children whose first label has this value."""
        for values in [values for values in self._children if values[:1] == (value,)]:
            del self._children[values]

    def collect(self) -> Iterator[Metric]:
        family = self._empty()
        for values, child in list(self._children.items()):
            self._add(family, values, child)
        yield family

    def describe(self) -> Iterator[Metric]:
        """Name the metric for the registry, which refuses a second metric of the same name."""
        yield self._empty()

    @abstractmethod
    def _new_child(self) -> Child: ...

    @abstractmethod
    def _empty(self) -> Family: ...

    @abstractmethod
    def _add(self, family: Family, values: Sequence[str], child: Child) -> None: ...


class Tally:
    """The number of one set of label values. Not safe to use from several threads."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class _Tallies(LoopMetric[Tally, CounterMetricFamily | GaugeMetricFamily]):
    _family: type[CounterMetricFamily] | type[GaugeMetricFamily]

    def _new_child(self) -> Tally:
        return Tally()

    def _empty(self) -> CounterMetricFamily | GaugeMetricFamily:
        return self._family(self._name, self._documentation, labels=self._labels)

    def _add(self, family: CounterMetricFamily | GaugeMetricFamily, values: Sequence[str], child: Tally) -> None:
        family.add_metric(values, child.value)


class LoopCounter(_Tallies):
    """A counter; its name ends with `_total`."""

    _family = CounterMetricFamily


class LoopGauge(_Tallies):
    """A gauge that is increased and decreased by steps."""

    _family = GaugeMetricFamily
