"""The memory of a KV cache is free once its engine has stopped, whoever has read from it."""

import os
from pathlib import Path

import pytest

from kvmesh.kvcache.transfer.shm import ShmBackend
from kvmesh.protocol.errors import TransferError
from tests.support.kv_peer import open_with_region

MEMORY = "/memfd:kvmesh-kv"


def mapped() -> int:
    """Return how many KV caches this process has mapped."""
    return sum(MEMORY in line for line in Path("/proc/self/maps").read_text().splitlines())


async def opened(name: str) -> ShmBackend:
    backend, _ = await open_with_region("shm", name)
    assert isinstance(backend, ShmBackend)
    return backend


async def test_readers_keep_no_map_of_engines_that_slept() -> None:
    before = mapped()
    reader = await opened("reader")
    for _ in range(4):  # each engine has the descriptor's number that the one before had
        engine = await opened("peer")
        await reader.fetch(engine.offer([1, 2], 32), 0, [3, 4])
        await engine.close()
        del engine
    last = await opened("peer")
    await reader.fetch(last.offer([1], 16), 0, [3])
    assert mapped() - before <= 3, "of the reader, of the last engine, and what the reader sees of that"
    await last.close()
    await reader.close()


async def test_a_stopped_engine_gives_its_memory_back_although_a_reader_has_it_mapped() -> None:
    reader, engine = await opened("reader"), await opened("peer")
    ticket = engine.offer([1, 2], 32)
    await reader.fetch(ticket, 0, [3, 4])
    descriptor = os.dup(engine._fd)
    assert os.fstat(descriptor).st_blocks > 0
    await engine.close()
    assert os.fstat(descriptor).st_blocks == 0
    os.close(descriptor)
    with pytest.raises(TransferError, match="ended before it was fetched"):
        await reader.fetch(ticket, 0, [3, 4])
    await reader.close()
