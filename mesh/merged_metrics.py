"""Merge the metrics of several processes that share one port.

Each process answers on a Unix socket in a shared directory. The process that is asked over HTTP asks the others.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from mesh.exposition import page
from mesh.metric_list import together_of

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
MAX_BYTES = 16 << 20


def merge(texts: Sequence[str]) -> str:
    """Add up samples of equal name and labels. Of gauges that all processes report alike, take the largest. Pure."""
    merged: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
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
    registry = CollectorRegistry()
    registry.register(_Given(merged.values()))
    return generate_latest(registry).decode()


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


async def merged_metrics(folder: Path) -> bytes:
    """Return the merged metrics of all processes that share `folder`. A process that does not answer is left out."""
    others = sockets_of_others(folder)
    texts = await asyncio.gather(*(_ask(path) for path in others))
    own = page().decode()
    return (await asyncio.to_thread(merge, [own, *filter(None, texts)])).encode()


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
