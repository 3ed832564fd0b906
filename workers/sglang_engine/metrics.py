"""SGLang's own metrics, under their own names, beside the worker's.

Its schedulers are processes of their own and leave their metrics as files in a folder that SGLang names in
PROMETHEUS_MULTIPROC_DIR when it starts; those of its tokenizer manager, in this process, are in the registry anyway.
"""

import os
from contextlib import ExitStack

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def export_metrics(cleanup: ExitStack, registry: CollectorRegistry = REGISTRY) -> None:
    """Until `cleanup` is closed, `registry` has them too. Does nothing where SGLang named no folder."""
    folder = os.environ.get(FOLDER, "")
    if not os.path.isdir(folder):
        return
    collector = MultiProcessCollector(None, path=folder)  # type: ignore[no-untyped-call]
    registry.register(collector)
    cleanup.callback(registry.unregister, collector)
