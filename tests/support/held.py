"""Read what a process holds: threads, descriptors, and memory of its own, in use or swapped out."""

from pathlib import Path
from typing import NamedTuple

import psutil


class Held(NamedTuple):
    threads: int
    fds: int
    private_mib: float  # RssAnon and VmSwap


def held_by(pid: int) -> Held:
    process = psutil.Process(pid)
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kib = sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
    return Held(process.num_threads(), process.num_fds(), kib / 1024)
