"""Record every decision with its reasons, in JSON lines, in files of bounded size."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvmesh.planner.connectors.connector import Applied
from kvmesh.planner.model import Observation, ScalingDecision, WorkerLoad
from kvmesh.planner.outlook import Outlook
from kvmesh.planner.slo import SloState
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import UNREADABLE

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 20
MAX_LOADS = 64  # of one role in a record: those of the busiest workers


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the record. `applied` is None if nothing was due; `error` says why an order failed."""

    ts_s: float  # wall clock
    planner: str
    mode: Literal["active", "shadow"]
    connector: str
    observation: Observation | None
    decision: ScalingDecision
    applied: Applied | None = None
    error: str = ""
    outlook: Outlook | None = None  # with each plan of the predictive loop
    slo: tuple[SloState, ...] = ()


def kept(observation: Observation | None) -> Observation | None:
    """Return the part of an observation that is recorded, bounded for any number of workers."""
    if observation is None:
        return None
    return replace(
        observation,
        prefill_loads=_busiest(observation.prefill_loads),
        decode_loads=_busiest(observation.decode_loads),
    )


def _busiest(loads: tuple[WorkerLoad, ...]) -> tuple[WorkerLoad, ...]:
    if len(loads) <= MAX_LOADS:
        return loads
    return tuple(sorted(loads, key=lambda load: (-load.queued_tokens, -load.kv_tokens, load.name))[:MAX_LOADS])


class RecordFile:
    """Appends records. A file that has reached half of the bound replaces `<name>.1`."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raise ConfigError if `path` cannot be written."""
        self._path = path
        self._max_bytes = max_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                self._size = file.tell()
        except OSError as error:
            raise ConfigError(f"no record can be written to {path}: {error}", hint="set --record-file") from error

    def add(self, record: Record) -> None:
        """Write one record, some kilobytes every few seconds. A full disk is logged and stops nothing."""
        line = msgspec.json.encode(record) + b"\n"
        try:
            if self._size and self._size + len(line) > self._max_bytes // 2:
                self._path.replace(older(self._path))
                self._size = 0
            with self._path.open("ab") as file:
                file.write(line)
            self._size += len(line)
        except OSError as error:
            log.warning("a decision was not recorded in %s: %s", self._path, error)


def older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def read_records(path: Path, last: int) -> list[Record]:
    """Return the last records, oldest first, without unreadable lines. Raise ConfigError if there is no record."""
    if not path.exists():
        raise ConfigError(f"there is no record at {path}", hint="start a planner, or set --record-file")
    records: list[Record] = []
    for file in (older(path), path):
        records = [*records, *_read(file)][-last:]
    return records


def _read(path: Path) -> Iterator[Record]:
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(Record)
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                try:
                    yield decoder.decode(line)
                except UNREADABLE:
                    continue
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="set --record-file") from error
