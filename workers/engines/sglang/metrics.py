"""Show SGLang's own metrics, under their own names, beside the worker's.

Its schedulers are processes of their own and leave their metrics as files in a folder that SGLang names in
PROMETHEUS_MULTIPROC_DIR when it starts. The metrics of its tokenizer manager, in this process, are in the registry
anyway. A metric that both have (the CPU time of a process) is that of this process: a page has each name once.
"""

import os
from collections.abc import Iterable
from contextlib import ExitStack

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def export_metrics(cleanup: ExitStack, registry: CollectorRegistry = REGISTRY) -> None:
    """Put SGLang's metrics into `registry` until `cleanup` is closed. Do nothing if SGLang named no folder."""
    folder = os.environ.get(FOLDER, "")
    if not os.path.isdir(folder):
        return
    collector = _OtherProcesses(folder, registry)
    registry.register(collector)
    cleanup.callback(registry.unregister, collector)


class _OtherProcesses(Collector):
    def __init__(self, folder: str, registry: CollectorRegistry) -> None:
        self._files = MultiProcessCollector(None, path=folder)  # type: ignore[no-untyped-call]
        self._registry = registry

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the files' names are not known yet, and the registry would refuse names that this process
        has.
        """
        return ()

    def collect(self) -> Iterable[Metric]:
        families: list[Metric] = list(self._files.collect())  # type: ignore[no-untyped-call]
        names = [sample.name for family in families for sample in family.samples]
        here = {family.name for family in self._registry.restricted_registry(names).collect()}
        return [family for family in families if family.name not in here]
