"""Measure shared storage: a prefix that another, killed worker has stored, and whether damage is served."""

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from kvmesh.kvcache.tiers.collect import SharedLimits
from kvmesh.kvcache.tiers.index import TierBlock, TierIndex
from kvmesh.kvcache.tiers.objects import FolderObjects
from kvmesh.kvcache.tiers.shared import SharedStore
from kvmesh.kvcache.tiers.store import TierError, TierIoError
from kvmesh.lab.bench.kv_disk import BLOCK_TOKENS, FINGERPRINT, INJECTED, Corruption, blocks_of, bytes_of
from kvmesh.lab.bench.kv_engines import BenchedEngine, KvBenchConfig, running
from kvmesh.lab.bench.kv_judge import Judge
from kvmesh.lab.bench.kv_restart import fill_and_kill
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.shared_tier import SharedSettings, take_news
from kvmesh.workers.tiers import MIB, TierSettings

LIMITS = SharedLimits(1 << 30, 3600.0)
FAULTS = ("payload bit", "header bit", "torn object", "foreign object", "wrong object", "EIO", "gone", "ENOSPC")
FOUND_BY_LISTING = ("header bit", "foreign object", "wrong object")  # a worker that knows an object has its checksums


class SharedTimes(NamedTuple):
    """TTFTs of prompts that another worker has stored, and of the same prompts computed; each of one prompt."""

    loaded_s: list[float]
    computed_s: list[float]
    failed: int

    @property
    def speedup(self) -> float:
        pairs = zip(self.computed_s, self.loaded_s, strict=True)
        return statistics.median([computed_s / loaded_s for computed_s, loaded_s in pairs])


async def measure_shared(
    config: KvBenchConfig, plain: BenchedEngine, place: str, prompts: Sequence[list[int]], judge: Judge
) -> SharedTimes:
    """Ask a worker that runs already for what a process has stored that was killed then."""
    settings = TierSettings(shared=SharedSettings(place, config.disk_mib * MIB))
    async with running(config, settings) as engine:
        other = BenchedEngine(engine)
        first = [prompts[0][0] + 1, *prompts[0][1:]]
        await other.ask(first)  # both have computed something
        await plain.ask(first)
        await asyncio.to_thread(fill_and_kill, config, settings, prompts)
        assert engine._shared is not None
        await engine._shared.refresh()
        if place.startswith("dir:"):
            forget_pages(Path(place.removeprefix("dir:")))
        return await _ask_both(other, plain, prompts, judge)


async def _ask_both(
    other: BenchedEngine, plain: BenchedEngine, prompts: Sequence[list[int]], judge: Judge
) -> SharedTimes:
    loaded_s, computed_s = list[float](), list[float]()
    for prompt in prompts:
        answer = await other.ask(prompt)
        await other.rest()
        expected = await plain.ask(prompt)
        judge.compare(answer, expected)
        loaded_s.append(answer.ttft_s)
        computed_s.append(expected.ttft_s)
    return SharedTimes(loaded_s, computed_s, other.failed)


def forget_pages(folder: Path) -> None:
    """Have the system drop the files of a folder from its page cache: they were just written by this host."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


class FaultyObjects(FolderObjects):
    """A folder whose next call fails."""

    error = ""

    def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        self._fail()
        return super().read(name, offset, num_bytes)

    def put(self, name: str, parts: Sequence[bytes | memoryview], over: str | None) -> bool:
        self._fail()
        return super().put(name, parts, over)

    def _fail(self) -> None:
        if self.error:
            raise TierIoError(self.error)


class _Worker:
    """A store and the index of one worker."""

    def __init__(self, path: Path, block_bytes: int, fingerprint: bytes = FINGERPRINT) -> None:
        self.objects = FaultyObjects(path)
        self.store = SharedStore(self.objects, fingerprint, block_bytes, INJECTED + 8, LIMITS)
        self.index = TierIndex(Tier.SHARED, INJECTED + 8, BLOCK_TOKENS, self.store.remove)
        self.refresh()

    def refresh(self) -> None:
        news = self.store.refresh(time.monotonic() + 60.0)
        take_news(self.index, self.store, news, FINGERPRINT, BLOCK_TOKENS)

    def put(self, blocks: Sequence[TierBlock]) -> None:
        size = self.store.block_bytes
        self.store.store(blocks, lambda block, into: np.copyto(into, bytes_of(block, size)))

    def read(self, block: TierBlock) -> tuple[bool, bool]:
        """Return whether a block is refused, and whether other bytes are served."""
        got: list[bool] = []
        expected = bytes_of(block, self.store.block_bytes)
        try:
            self.store.load([block.address], lambda data: got.append(np.array_equal(data, expected)))
        except TierError:
            return not got, got == [False]
        return False, not got[0]


def corrupt_shared(folder: Path, block_bytes: int) -> Corruption:
    """Damage objects in every way, and count what is noticed and served: by who knew them, and who finds them later."""
    path = folder / "corrupt-shared"
    knew = _Worker(path, block_bytes)
    *blocks, other = blocks_of(INJECTED + 1)
    knew.put(blocks)
    foreign = _Worker(path, block_bytes, b"\xa5" * 32)
    foreign.put(blocks)
    rng, found = Random(5), list[tuple[bool, bool]]()
    faults = [FAULTS[number % len(FAULTS)] for number in range(INJECTED)]
    for block, fault in zip(blocks, faults, strict=True):
        _damage(path, fault, knew, foreign, block, other, rng)
        if fault not in FOUND_BY_LISTING:
            found.append(knew.read(block))
            knew.objects.error = ""
    later = _Worker(path, block_bytes)
    found += [later.read(block) for block, fault in zip(blocks, faults, strict=True) if fault in FOUND_BY_LISTING]
    for worker in (knew, foreign, later):
        worker.store.close()
    return Corruption(len(found), sum([caught for caught, _ in found]), sum([served for _, served in found]))


def _damage(
    path: Path, fault: str, knew: _Worker, foreign: _Worker, block: TierBlock, other: TierBlock, rng: Random
) -> None:
    """Do harm to the object of a block, or to the next call."""
    [place] = knew.store._catalog.places([block.address])
    file, size = path / place.name, knew.store.block_bytes
    data = bytearray(file.read_bytes())
    match fault:
        case "payload bit":
            data[place.offset + rng.randrange(size)] ^= 1 << rng.randrange(8)
        case "header bit":
            data[rng.randrange(place.offset)] ^= 1 << rng.randrange(8)
        case "torn object":
            del data[place.offset + rng.randrange(size) :]
        case "foreign object":
            [there] = foreign.store._catalog.places([block.address])
            data = bytearray((path / there.name).read_bytes())
        case "wrong object":
            knew.put([other])
            [there] = knew.store._catalog.places([other.address])
            data = bytearray((path / there.name).read_bytes())
        case "EIO":
            knew.objects.error = "Input/output error"
        case "ENOSPC":
            knew.store.remove(block.address)
            file.unlink()
            knew.objects.error = "No space left on device"
            knew.put([block])
            return
        case "gone":
            file.unlink()
            return
    file.write_bytes(data)
