"""Show what a planner has decided lately, and why: `kvmesh planner explain`."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from kvmesh.mesh.config import load
from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.model import RoleFleet, Traffic
from kvmesh.planner.outlook import sentences
from kvmesh.planner.record import Record, read_records
from kvmesh.planner.slo import sentence_of
from kvmesh.protocol.errors import ConfigError


class PlannerExplainConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_PLANNER_EXPLAIN_<NAME>`, that over the default."""

    record_file: Annotated[
        str, Meta(description="of the planner; `kvmesh up --planner`: <run directory>/planner.jsonl")
    ]
    last: Annotated[int, Meta(ge=1, le=100_000, description="how many of the last decisions")] = 20
    changes: Annotated[bool, Meta(description="only those that changed something, or failed")] = False
    json: Annotated[bool, Meta(description="the records as they are, one line each")] = False


def explain(argv: Sequence[str]) -> int:
    default = os.environ.get("KVMESH_PLANNER_RECORD_FILE") or ServiceConfig().record_file
    config = load(
        PlannerExplainConfig,
        argv,
        {"KVMESH_PLANNER_EXPLAIN_RECORD_FILE": default, **os.environ},
        prefix="KVMESH_PLANNER_EXPLAIN_",
        prog="kvmesh planner explain",
        description="Show what a planner has decided lately, and why.",
        section="planner_explain",
    )
    read = 100_000 if config.changes else config.last
    records = [r for r in read_records(Path(config.record_file), read) if not config.changes or is_change(r)]
    records = records[-config.last :]
    if not records:
        raise ConfigError(f"nothing was decided yet in {config.record_file}", hint="look again in some seconds")
    if config.json:
        for record in records:
            print(msgspec.json.encode(record).decode())
    else:
        show(records, Console(highlight=False))
    return 0


def is_change(record: Record) -> bool:
    return record.applied is not None or bool(record.error)


def show(records: Sequence[Record], console: Console) -> None:
    last = records[-1]
    console.print(f"What {last.planner} decided ({last.mode}, {last.connector}); times are local\n", style="bold")
    console.print(line_of(HEADINGS), style="underline")
    for record in records:
        style = "red" if record.error else "bold" if record.applied is not None else ""
        console.print(Text(line_of(row_of(record)), style))
        for reason in reasons(record):
            console.print(Padding(Text(reason, "" if is_change(record) else "dim"), (0, 0, 0, 10)))


HEADINGS = ("at", "loop", "prefill", "decode", "requests/s", "TTFT ms", "ITL ms")
WIDTHS = (8, 10, 9, 9, 10, 8, 7)


def line_of(row: Sequence[str]) -> str:
    cells = [f"{cell:{'<' if i < 2 else '>'}{width}}" for i, (cell, width) in enumerate(zip(row, WIDTHS, strict=True))]
    return "  ".join(cells)


def row_of(record: Record) -> list[str]:
    decision, seen = record.decision, record.observation
    traffic = None if seen is None else seen.traffic
    return [
        time.strftime("%H:%M:%S", time.localtime(record.ts_s)),
        decision.loop,
        counts(None if seen is None else seen.prefill, decision.prefill),
        counts(None if seen is None else seen.decode, decision.decode),
        rate(traffic),
        milliseconds(None if traffic is None else traffic.ttft_s),
        milliseconds(None if traffic is None else traffic.itl_s),
    ]


def counts(fleet: RoleFleet | None, target: int) -> str:
    """Write `3+1 -> 5` for three ready workers, one that starts, and five that are asked for."""
    if fleet is None:
        return f"? -> {target}"
    there = str(fleet.ready) + (f"+{fleet.starting}" if fleet.starting else "")
    return there if fleet.ordered == target else f"{there} -> {target}"


def rate(traffic: Traffic | None) -> str:
    if traffic is None or traffic.requests is None:
        return "?"
    return f"{traffic.requests / max(1e-9, traffic.end_s - traffic.start_s):.1f}"


def milliseconds(value_s: float | None) -> str:
    return "?" if value_s is None else f"{1000 * value_s:.1f}"


def reasons(record: Record) -> list[str]:
    decision = record.decision
    lines = [f"{reason.code}: {reason.text}" for reason in decision.reasons if not is_in_outlook(record, reason.code)]
    if record.outlook is not None:
        lines += sentences(decision, record.outlook)
        lines += [sentence_of(state) for state in record.slo]
    if record.applied is not None:
        lines += [f"note: {note}" for note in record.applied.notes]
    if record.error:
        lines.append(f"failed: {record.error}")
    return lines


def is_in_outlook(record: Record, code: str) -> bool:
    """Return whether the outlook says the same, with more figures."""
    return code == "forecast" and record.outlook is not None and record.decision.peak is not None
