"""Count histograms on the event loop alone; see mesh/tally.py."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from kvmesh.mesh.tally import LoopMetric

_NONE: Mapping[int, Exemplar] = {}


class Distribution:
    """The histogram of one set of label values. Not safe to use from several threads."""

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.exemplars: dict[int, Exemplar] | None = None  # the last one between two bounds
        self.counts = [0] * (len(bounds) + 1)  # between the bounds; the last counts values above all bounds
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def exemplify(self, value: float, trace_id: str, unix_s: float) -> None:
        """Name the trace of a request that was observed with `value`. Prometheus asks for it as OpenMetrics."""
        if self.exemplars is None:
            self.exemplars = {}
        self.exemplars[bisect_left(self._bounds, value)] = Exemplar({"trace_id": trace_id}, value, unix_s)


class LoopHistogram(LoopMetric[Distribution, HistogramMetricFamily]):
    """A histogram. `buckets`: upper bounds, ascending; +Inf is added."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._bounds = tuple(buckets)
        self._edges = [*map(floatToGoString, self._bounds), "+Inf"]
        super().__init__(name, documentation, labels, registry=registry)

    def _new_child(self) -> Distribution:
        return Distribution(self._bounds)

    def _empty(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=self._labels)

    def _add(self, family: HistogramMetricFamily, values: Sequence[str], child: Distribution) -> None:
        named = child.exemplars or _NONE
        rows = zip(self._edges, accumulate(child.counts), strict=True)
        buckets = [(*row, named[at]) if at in named else row for at, row in enumerate(rows)]
        family.add_metric(values, buckets, child.total)
