"""Measure the store of a disk tier by itself: its speed against `dd` with direct I/O, and whether damage is served."""

import errno
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from kvmesh.kvcache.tiers.address import content_address, root_address
from kvmesh.kvcache.tiers.disk import DiskStore, SegmentPart, SystemIo, form_of
from kvmesh.kvcache.tiers.folder import own_folder
from kvmesh.kvcache.tiers.index import TierBlock
from kvmesh.kvcache.tiers.slots import write_header
from kvmesh.kvcache.tiers.store import Payload, TierError
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.hashing import sequence_hashes

BLOCK_TOKENS = 16
MIB = 1 << 20
INJECTED = 160  # faults
FINGERPRINT = b"\x5a" * 32


class DiskShares(NamedTuple):
    """Speed of the store / that of dd, of whole blocks."""

    read: float
    write: float
    path: str  # direct or buffered


class Corruption(NamedTuple):
    injected: int
    caught: int  # an error, and so a block that is computed
    served: int  # other bytes than were stored


class FaultyIo(SystemIo):
    """An operating system whose next call fails."""

    def __init__(self) -> None:
        self.error = 0
        self.is_short = False

    def read(self, file: int, into: Payload, offset: int) -> int:
        self._fail()
        return super().read(file, into[: len(into) // 2] if self.is_short else into, offset)

    def write(self, file: int, data: Payload, offset: int) -> int:
        self._fail()
        return super().write(file, data, offset)

    def _fail(self) -> None:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))


def open_store(path: Path, block_bytes: int, max_blocks: int, io: SystemIo | None = None) -> DiskStore:
    form = form_of(FINGERPRINT, block_bytes, BLOCK_TOKENS, max_blocks)
    return DiskStore(own_folder(path, form), max_blocks, block_bytes, io)


def blocks_of(count: int) -> list[TierBlock]:
    """Return blocks of as many prompts."""
    root, made = root_address(FINGERPRINT, None, None), list[TierBlock]()
    for number in range(count):
        tokens = tuple(range(number, number + BLOCK_TOKENS))
        [name] = sequence_hashes(tokens, BLOCK_TOKENS)
        made.append(TierBlock(name, None, content_address(root, tokens), tokens))
    return made


def bytes_of(block: TierBlock, num_bytes: int) -> Payload:
    return np.random.default_rng(int.from_bytes(block.address[:8], "little")).integers(
        0, 256, num_bytes, dtype=np.uint8
    )


def measure_shares(folder: Path, block_bytes: int, mib: int, rounds: int) -> DiskShares:
    """Write and read `mib` in blocks, and the same with dd, in turn; return the medians of the rounds.

    Both write over what they have written before the first round: no file gets its space while it is measured.
    """
    blocks = blocks_of(max(8, mib * MIB // block_bytes))
    store = open_store(folder / "store", block_bytes, len(blocks))
    shares = [_shares_once(folder, store, blocks, dd_first=number % 2 == 1) for number in range(rounds + 1)][1:]
    store.close()
    read = statistics.median([share.read for share in shares])
    write = statistics.median([share.write for share in shares])
    return DiskShares(round(read, 3), round(write, 3), shares[-1].path)


def _shares_once(folder: Path, store: DiskStore, blocks: Sequence[TierBlock], *, dd_first: bool) -> DiskShares:
    size = store.block_bytes
    total, payload, got = len(blocks) * size, bytes_of(blocks[0], size), np.empty(size, np.uint8)
    write = partial(store.store, blocks, lambda _, into: np.copyto(into, payload))
    read = partial(store.load, [block.address for block in blocks], lambda data: np.copyto(got, data))
    dd_write, dd_read = (partial(dd, folder, total // MIB, is_read=is_read) for is_read in (False, True))
    write_s, dd_write_speed = _in_turn(write, dd_write, other_first=dd_first)
    read_s, dd_read_speed = _in_turn(read, dd_read, other_first=dd_first)
    store.clear()
    path = "direct" if store.is_direct else "buffered"
    return DiskShares(total / read_s / dd_read_speed, total / write_s / dd_write_speed, path)


def _in_turn(work: Callable[[], object], other: Callable[[], float], *, other_first: bool) -> tuple[float, float]:
    """Return how long `work` takes, and what `other` returns."""
    if other_first:
        result = other()
        return _timed(work), result
    took_s = _timed(work)
    return took_s, other()


def dd(folder: Path, mib: int, *, is_read: bool) -> float:
    """Return the bytes per second of dd with direct I/O. Raise ConfigError if the file system takes none.

    dd writes over its file, as the store writes over its slots.
    """
    file = folder / "dd"
    command = ["dd", "bs=1M", f"count={mib}"]
    command += [f"if={file}", "of=/dev/null", "iflag=direct"] if is_read else ["if=/dev/zero", f"of={file}"]
    command += [] if is_read else ["oflag=direct", "conv=notrunc"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}, check=False)
    found = re.search(r"(\d+) bytes .* copied, ([0-9.e-]+) s", done.stderr)
    if done.returncode or found is None:
        raise ConfigError(f"dd failed: {done.stderr.strip()[:300]}", hint="choose a --disk that takes direct I/O")
    return int(found[1]) / float(found[2])


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


FAULTS = ("payload bit", "header bit", "torn slot", "foreign slot", "wrong slot", "EIO", "short read", "ENOSPC")
FOUND_AT_START = ("header bit", "foreign slot")  # a running store does not read the header again


def corrupt(folder: Path, block_bytes: int) -> Corruption:
    """Damage blocks in every way, and count what is noticed and what is served: running, and after a restart."""
    io = FaultyIo()
    store = open_store(folder / "corrupt", block_bytes, INJECTED + 8, io)
    *blocks, other = blocks_of(INJECTED + 1)
    store.store(blocks, lambda block, into: np.copyto(into, bytes_of(block, block_bytes)))
    rng, caught, served = Random(3), 0, 0
    faults = [FAULTS[number % len(FAULTS)] for number in range(INJECTED)]
    for block, fault in zip(blocks, faults, strict=True):
        is_caught, is_served = _inject(fault, store, io, block, other, rng)
        caught += is_caught and fault not in FOUND_AT_START
        served += is_served
    store.close()
    again = open_store(folder / "corrupt", block_bytes, INJECTED + 8)
    for block, fault in zip(blocks, faults, strict=True):
        is_caught, is_served = _read(again, block)
        caught += is_caught and fault in FOUND_AT_START
        served += is_served
    again.close()
    return Corruption(INJECTED, caught, served)


def _inject(
    fault: str, store: DiskStore, io: FaultyIo, block: TierBlock, other: TierBlock, rng: Random
) -> tuple[bool, bool]:
    """Do harm to a block; return whether it is refused, and whether other bytes are served."""
    size, slot = store.block_bytes, store._places[block.address].slot
    header, payload = store._headers_at(slot, 1), store._payloads_at(slot, 1)
    made = np.zeros(header.num_bytes, np.uint8)
    match fault:
        case "payload bit":
            _flip(store, payload, rng.randrange(size), rng.randrange(8))
        case "header bit":
            _flip(store, header, rng.randrange(200), rng.randrange(8))
        case "torn slot":
            _overwrite(store, payload, bytes_of(other, size)[: size // 2])
        case "foreign slot":
            write_header(made, block, b"\xa5" * 32, store._folder.epoch, 1, bytes_of(block, size))
            _overwrite(store, header, made)
        case "wrong slot":
            write_header(made, other, FINGERPRINT, store._folder.epoch, 1, bytes_of(other, size))
            _overwrite(store, header, made)
            _overwrite(store, payload, bytes_of(other, size))
        case "EIO":
            io.error = errno.EIO
        case "short read":
            io.is_short = True
        case "ENOSPC":
            io.error = errno.ENOSPC
            store.remove(block.address)
            store.store([block], lambda _, into: np.copyto(into, bytes_of(block, size)))
            io.error = 0
    result = _read(store, block)
    io.error, io.is_short = 0, False
    return result


def _read(store: DiskStore, block: TierBlock) -> tuple[bool, bool]:
    """Return whether a block is refused, and whether other bytes are served."""
    got: list[bool] = []
    try:
        store.load([block.address], lambda data: got.append(np.array_equal(data, bytes_of(block, store.block_bytes))))
    except TierError:
        return not got, got == [False]
    return False, not got[0]


def _flip(store: DiskStore, part: SegmentPart, at: int, bit: int) -> None:
    with store._folder.segment(part.segment).open("rb") as file:
        file.seek(part.offset + at)
        was = file.read(1)[0]
    _overwrite(store, part, np.array([was ^ 1 << bit], np.uint8), at)


def _overwrite(store: DiskStore, part: SegmentPart, data: Payload, at: int = 0) -> None:
    with store._folder.segment(part.segment).open("r+b") as file:
        file.seek(part.offset + at)
        file.write(data.data)
        file.flush()
        os.fsync(file.fileno())
