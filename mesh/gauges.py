"""Declare gauges, and what they say together when several processes answer as one (mesh/merged_metrics.py)."""

from collections.abc import Sequence
from typing import Literal

from prometheus_client import Gauge

Together = Literal["sum", "alike"]
"""`sum`: each process counts its own. `alike`: each reports the same thing; the largest counts, as some may lag."""

_declared: dict[str, Together] = {
    "process_virtual_memory_bytes": "sum",
    "process_resident_memory_bytes": "sum",
    "process_start_time_seconds": "alike",
    "process_open_fds": "sum",
    "process_max_fds": "alike",
    "python_info": "alike",
}


def gauge(name: str, documentation: str, labels: Sequence[str] = (), *, together: Together) -> Gauge:
    """Return a new gauge of this process's registry."""
    declare(name, together)
    return Gauge(name, documentation, labels)


def declare(name: str, together: Together) -> None:
    """Declare what a gauge says together. Processes that answer as one declare the same."""
    _declared[name] = together


def together_of(name: str) -> Together | None:
    """Return what was declared of a gauge; None: nothing. The time at which a counter was made is no count."""
    return "alike" if name.endswith("_created") else _declared.get(name)
