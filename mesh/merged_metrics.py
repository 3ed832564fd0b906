"""Merge the metrics of several processes that share one port.

Each process answers on a Unix socket in a shared directory. The process that is asked over HTTP asks the others.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from kvmesh.mesh.exposition import Exposed, open_text, page
from kvmesh.mesh.metric_list import together_of

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
MAX_BYTES = 16 << 20


SampleKey = tuple[str, tuple[tuple[str, str], ...]]


def merge(texts: Sequence[str]) -> str:
    """Add up samples of equal name and labels. Of gauges that all processes report alike, take the largest. Pure."""
    return generate_latest(_registry_of(_added(texts))).decode()


def merge_open(texts: Sequence[str], named: Mapping[SampleKey, Exemplar]) -> str:
    """Return the same as OpenMetrics, with the exemplars of one process. Pure."""
    merged = _added(texts)
    for metric in merged.values():
        metric.samples = [one._replace(exemplar=named.get(_key(one))) for one in metric.samples]
    # OpenMetrics has the time of a counter's beginning within the counter, and the name is taken by it.
    kept = {name: metric for name, metric in merged.items() if name.removesuffix("_created") not in {*merged} - {name}}
    return open_text(_registry_of(kept)).decode()


def exemplars_of(registry: Collector) -> dict[SampleKey, Exemplar]:
    """Return the exemplars of this process, by their samples."""
    found = [sample for metric in registry.collect() for sample in metric.samples]
    return {_key(sample): sample.exemplar for sample in found if sample.exemplar is not None}


def _key(sample: Sample) -> SampleKey:
    return sample.name, tuple(sorted(sample.labels.items()))


def _registry_of(merged: Mapping[str, Metric]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Given(merged.values()))
    return registry


def _added(texts: Sequence[str]) -> dict[str, Metric]:
    merged: dict[str, Metric] = {}
    values: dict[str, dict[SampleKey, float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            found = values.setdefault(family.name, {})
            is_added = family.type != "gauge" or together_of(family.name) != "alike"
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                before = found.get(key)
                if before is None:
                    found[key] = sample.value
                else:
                    found[key] = before + sample.value if is_added else max(before, sample.value)
    for name, metric in merged.items():
        for (sample_name, labels), value in values[name].items():
            metric.add_sample(sample_name, dict(labels), value)
    return merged


class _Given(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


@asynccontextmanager
async def sharing(folder: Path) -> AsyncIterator[None]:
    """Answer the other processes while the block runs."""
    path = folder / f"{os.getpid()}.sock"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(page())
        with suppress(OSError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


def ready_file(folder: Path, pid: int) -> Path:
    """Return the file by which a process says that it listens."""
    return folder / f"{pid}.ready"


async def merged_metrics(folder: Path, *, is_open: bool = False) -> bytes:
    """Return the merged metrics of all processes that share `folder`. A process that does not answer is left out.

    As OpenMetrics (`is_open`) they have the exemplars of the process that was asked.
    """
    others = sockets_of_others(folder)
    texts = [page().decode(), *filter(None, await asyncio.gather(*(_ask(path) for path in others)))]
    if is_open:
        return (await asyncio.to_thread(merge_open, texts, exemplars_of(Exposed()))).encode()
    return (await asyncio.to_thread(merge, texts)).encode()


async def _ask(path: Path) -> str:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                return (await _read(reader)).decode()
            finally:
                writer.close()
    except ConnectionRefusedError:  # the process was killed
        remove(path)
    except (OSError, ValueError) as error:  # TimeoutError is an OSError
        log.warning("the metrics of another process are missing: %s", error or "it does not answer")
    return ""


def sockets_of_others(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.sock") if path.stem != str(os.getpid())]


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Read to the end. Raises ValueError if that is too much."""
    parts: list[bytes] = []
    while part := await reader.read(1 << 16):
        parts.append(part)
        if len(parts) << 16 > MAX_BYTES * 2:
            raise ValueError(f"more than {MAX_BYTES} bytes")
    return b"".join(parts)
