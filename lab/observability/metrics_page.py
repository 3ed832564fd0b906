"""Write docs/metrics.md from the list of metrics. Pure."""

from collections.abc import Iterator

from kvmesh.mesh.metric_list import GROUPS, LABELS, OTHER, PROCESS_LABELS, DeclaredMetric

_HEAD = f"""# Metrics

Written by `kvmesh lab metrics-docs` from `mesh/metric_list.py`; a test proves that both are the same. How to use them:
[observability.md](observability.md).

Every process answers `GET /metrics` in Prometheus' text format: frontends and routers on their HTTP port, workers and
the planner on `--metrics-port`. Frontends answer OpenMetrics to scrapers that prefer it. With `--mesh-tls` all of them
answer members of the mesh alone ([security.md](security.md)).

Names are an interface: one does not change its meaning, and leaves with a note in the changelog. New labels may come:
sum over the labels that a query does not need. An engine's own metrics (`vllm:...`, `sglang:...`, `llamacpp:...`)
stand on the page of its worker, under the engine's names and with the engine's labels. Gauges that cost something to
find out are read at the scrape.

## Labels

Each process adds {", ".join(f"`{name}`" for name in PROCESS_LABELS)} to all metrics of its own, where they apply:
`model`, `role` and `worker` on pages of workers, where the workers of the process share them. A metric that has
such a label itself keeps its own. A label has at most as many values per process as the table says; further values
become `{OTHER}`, and a label without a number has values that are written in the code.

| label | meaning | most values |
|---|---|---|
"""
_TYPES = {"counter": "counter", "gauge": "gauge", "histogram": "histogram", "info": "info"}


def metrics_page() -> str:
    """Return docs/metrics.md."""
    rules = (
        f"| `{name}` | {rule.meaning} | {f'{rule.most:,}' if rule.most else ''} |" for name, rule in LABELS.items()
    )
    return _HEAD + "\n".join([*rules, *_groups()]) + "\n"


def _groups() -> Iterator[str]:
    for group in GROUPS:
        yield f"\n## {group.title}\n\n{group.where}\n"
        yield "| name | type | unit | labels | meaning |\n|---|---|---|---|---|"
        for metric in group.metrics:
            yield _row(metric)


def _row(metric: DeclaredMetric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {_TYPES[metric.kind]} | {metric.unit} | {labels} | {metric.help} |"
