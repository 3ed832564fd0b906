"""Write the page of metrics, with the labels that all metrics of a process share.

They are added here and nowhere else, when Prometheus asks: counting costs nothing more for them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics import exposition as open_metrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvmesh.mesh.metric_list import DECLARED, metric_of
from kvmesh.protocol.version import RELEASE

BUILD = "kvmesh_build_info"
PLAIN, OPEN_METRICS = "text/plain", "application/openmetrics-text"
PLAIN_TYPE, OPEN_TYPE = CONTENT_TYPE_LATEST, open_metrics.CONTENT_TYPE_LATEST
VERSIONS = {PLAIN: ("0.0.4", "1.0.0"), OPEN_METRICS: ("0.0.1", "1.0.0")}


def _nothing() -> Mapping[str, str]:
    return {}


_labels: Callable[[], Mapping[str, str]] = _nothing


@contextmanager
def labelled(component: str, namespace: str, more: Callable[[], Mapping[str, str]] = _nothing) -> Iterator[None]:
    """Add the labels of a service to all metrics of this process while the block runs.

    `more` gives further ones at each scrape. Engines' own metrics, and labels that a metric has itself, stay as they
    are.
    """
    global _labels
    before, fixed = _labels, {"component": component, "namespace": namespace}

    def labels() -> Mapping[str, str]:
        return {name: value for name, value in (fixed | dict(more())).items() if value}

    _labels = labels
    try:
        yield
    finally:
        _labels = before


class Exposed(CollectorRegistry):
    """The metrics of a registry as a page shows them."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__()
        self._whole = registry

    def collect(self) -> Iterator[Metric]:
        labels = _labels()
        for metric in self._whole.collect():
            yield with_labels(metric, labels)
        if labels:
            yield with_labels(_build(), labels)

    def restricted_registry(self, names: object) -> "Exposed":  # type: ignore[override]
        """Return the whole page: who asks for some of its metrics gets the others as well."""
        return self


def with_labels(metric: Metric, labels: Mapping[str, str]) -> Metric:
    """Return a metric with more labels, if it is one of ours. Pure."""
    if not labels or metric_of(metric.name) is None:
        return metric
    shown = Metric(metric.name, metric.documentation, metric.type, metric.unit)
    shown.samples = [Sample(one[0], {**labels, **one[1]}, *one[2:]) for one in metric.samples]
    return shown


def _build() -> Metric:
    family = GaugeMetricFamily(BUILD, DECLARED[BUILD].help, labels=DECLARED[BUILD].labels)
    family.add_metric([RELEASE], 1.0)
    return family


def page(registry: Collector = REGISTRY) -> bytes:
    """Return the page of this process."""
    return generate_latest(_exposed(registry))


def open_page(registry: Collector = REGISTRY) -> bytes:
    """Return the page of this process as OpenMetrics: the same metrics, and the traces that they name."""
    return open_text(_exposed(registry))


def open_text(registry: Collector) -> bytes:
    """Return metrics as OpenMetrics, without more labels."""
    return bytes(open_metrics.generate_latest(registry))  # type: ignore[no-untyped-call]


def _exposed(registry: Collector) -> Exposed:
    return Exposed(registry if isinstance(registry, CollectorRegistry) else REGISTRY)


def wants_open_metrics(accept: str) -> bool:
    """Return whether a scraper with this `accept` header would rather have OpenMetrics than text. Pure."""
    best = {OPEN_METRICS: 0.0, PLAIN: 0.0}
    for kind in accept.split(","):
        name, *given = [part.strip().lower() for part in kind.split(";")]
        fields = dict(field.partition("=")[::2] for field in given)
        if name in best and fields.get("version", "1.0.0") in VERSIONS[name]:
            best[name] = max(best[name], _weight(fields.get("q", "1")))
    return best[OPEN_METRICS] > 0 and best[OPEN_METRICS] >= best[PLAIN]


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
