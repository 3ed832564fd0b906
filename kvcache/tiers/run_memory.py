"""Provide the memory that runs of slots are read into and written from, in huge pages where the system has them.

A request to a disk is split where its memory has too many pieces. Pages of 4 KiB are so many pieces that a disk with
direct I/O gets requests of 1 MiB at most; one of 2 MiB in a huge page goes in one piece, which is often twice as fast.
"""

import mmap
import threading
from typing import NamedTuple

import numpy as np

from kvmesh.kvcache.tiers.slots import PAGE_BYTES
from kvmesh.kvcache.tiers.store import Payload

HUGE_BYTES = 2 << 20


class RunMemory(NamedTuple):
    """Hold the bytes of a run."""

    headers: Payload
    payloads: Payload


class RunMemories:
    """The memory of runs that are on their way at the same time, for each thread its own."""

    def __init__(self, count: int, header_bytes: int, payload_bytes: int) -> None:
        """Have each thread use `count` runs in turn, of so many bytes."""
        self._count = count
        self._header_bytes = header_bytes
        self._run_bytes = header_bytes + payload_bytes
        self._own = threading.local()

    def of(self, number: int) -> RunMemory:
        """Return the memory of this thread for its run `number`; the run `count` runs later has the same memory."""
        if not hasattr(self._own, "memory"):
            self._own.memory = whole_pages(self._count * self._run_bytes)
        run: Payload = self._own.memory[number % self._count * self._run_bytes :][: self._run_bytes]
        return RunMemory(run[: self._header_bytes], run[self._header_bytes :])


def whole_pages(num_bytes: int) -> Payload:
    """Return memory that begins at a page; from 1 MiB on at a huge page, if the system has them."""
    assert num_bytes % PAGE_BYTES == 0, "headers and payloads are whole pages"
    if num_bytes < HUGE_BYTES // 2 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    huge_bytes = -(-num_bytes // HUGE_BYTES) * HUGE_BYTES
    memory = mmap.mmap(-1, huge_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        pass
    whole = np.frombuffer(memory, np.uint8)
    first = -whole.ctypes.data % HUGE_BYTES
    return whole[first : first + num_bytes]
