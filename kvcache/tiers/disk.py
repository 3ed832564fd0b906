"""Keep blocks on a disk: slots of one size in segments, which a restart finds again.

A segment is a file: first the headers of its slots, then their payloads, both in whole pages. Each header proves its
block (`kvcache/tiers/slots.py`), so nothing is synchronised: a block that a crash cut off is lost, never wrong.
Payloads are written before headers. Slots that follow each other are read and written together, past the page cache
where the file system allows that; else through it, which is counted. While a run is checked or filled, the next ones
are on their way, in threads that never wait for whoever checks or fills.
"""

import errno
import fcntl
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import NamedTuple, Protocol

from kvmesh.kvcache.tiers.folder import FolderForm, OwnedFolder
from kvmesh.kvcache.tiers.index import TierBlock
from kvmesh.kvcache.tiers.regular import open_regular
from kvmesh.kvcache.tiers.run_memory import RunMemories, RunMemory, whole_pages
from kvmesh.kvcache.tiers.slots import SlotBody, checksum, header_bytes, pages, read_header, write_header
from kvmesh.kvcache.tiers.store import Payload, TierCorruptError, TierError, TierIoError

log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
RUN_BYTES = 2 << 20  # that are read or written at a time, unless one block is larger
RUNS_AHEAD = 2  # that are on their way while one is checked or filled

Fill = Callable[[TierBlock, Payload], object]


class FileIo(Protocol):
    """The calls to the operating system that may fail."""

    def open(self, path: str, flags: int) -> int: ...
    def allocate(self, file: int, num_bytes: int) -> None: ...
    def read(self, file: int, into: Payload, offset: int) -> int: ...
    def write(self, file: int, data: Payload, offset: int) -> int: ...


class SystemIo:
    """The operating system."""

    def open(self, path: str, flags: int) -> int:
        return open_regular(path, flags)

    def allocate(self, file: int, num_bytes: int) -> None:
        os.posix_fallocate(file, 0, num_bytes)

    def read(self, file: int, into: Payload, offset: int) -> int:
        return os.preadv(file, [into.data], offset)

    def write(self, file: int, data: Payload, offset: int) -> int:
        return os.pwritev(file, [data.data], offset)


def form_of(fingerprint: bytes, block_bytes: int, block_size: int, max_blocks: int) -> FolderForm:
    """Return the form of a folder for at most so many blocks."""
    header, payload = header_bytes(block_size), pages(block_bytes)
    per_segment = max(1, min(SEGMENT_BYTES // (header + payload), max_blocks))
    return FolderForm(fingerprint.hex(), header, payload, per_segment)


class _Place(NamedTuple):
    """Name the slot of a block, and the checksum that its bytes must have."""

    slot: int
    checksum: bytes


class _Writing(NamedTuple):
    """Hold a run that is written, and for each block its checksum, or why it is no block."""

    first: int  # slot
    blocks: Sequence[TierBlock]
    filled: list[bytes | Exception]
    memory: RunMemory


class SegmentPart(NamedTuple):
    """Name a part of a segment: that of one slot, or of those that follow it too."""

    segment: int
    offset: int
    num_bytes: int


class DiskStore:
    """A tier of `max_blocks` slots in a folder that this process owns. Space is taken as it is first used."""

    def __init__(
        self, folder: OwnedFolder, max_blocks: int, block_bytes: int, io: FileIo | None = None, scan_s: float = 30.0
    ) -> None:
        """Find the blocks that are there, for at most `scan_s`: what was not read by then is lost.

        Raise TierIoError if the folder cannot be read.
        """
        self.max_blocks = max_blocks
        self.block_bytes = block_bytes
        self.ios = Counter[str]()
        self.found: list[tuple[TierBlock, int]] = []  # with their stamps, until whoever restores them has taken them
        self._io = SystemIo() if io is None else io
        self._folder = folder
        self._form = folder.form
        self._run_blocks = max(1, RUN_BYTES // folder.form.payload_bytes)
        self._fingerprint = bytes.fromhex(folder.form.fingerprint)
        self._files: dict[int, int] = {}  # of segments
        self._is_direct = hasattr(os, "O_DIRECT")
        self._places: dict[bytes, _Place] = {}
        self._closed = False
        self._lock = threading.Lock()  # of the maps; nobody waits for a device while it has it
        self._opening = threading.Lock()  # of segments that are opened
        self._memories = RunMemories(
            RUNS_AHEAD + 1,
            self._run_blocks * folder.form.header_bytes,
            self._run_blocks * folder.form.payload_bytes,
        )
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="tier disk read")
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="tier disk write")
        try:
            taken = self._scan(time.monotonic() + scan_s)
        except (OSError, TierIoError) as error:
            self.close()
            raise TierIoError(f"{folder.path} cannot be read: {error}") from error
        self._free = [slot for slot in range(max_blocks - 1, -1, -1) if slot not in taken]  # low slots first

    @property
    def is_direct(self) -> bool:
        """Return whether reads and writes bypass the page cache."""
        return self._is_direct

    def find(self, address: bytes) -> bool:
        return address in self._places

    def load(self, addresses: Sequence[bytes], take: Callable[[Payload], object]) -> None:
        places: list[_Place] = []
        for address in () if self._closed else addresses:
            if (place := self._places.get(address)) is None:
                break
            places.append(place)
        with closing(self._read_runs(list(self._runs(places)))) as runs:
            for run, payloads in runs:
                for place, payload in zip(run, payloads, strict=True):
                    if checksum(payload.data) != place.checksum:
                        raise TierCorruptError("the bytes of a KV block are damaged")
                    take(payload)
        if len(places) < len(addresses):
            raise TierError("the disk does not hold the block any more")

    def store(self, blocks: Sequence[TierBlock], fill: Fill) -> list[Exception | None]:
        outcomes: list[Exception | None] = []
        on_their_way = deque[tuple[_Writing, Future[None]]]()
        begun = 0
        for number, run in enumerate(self._runs(self._take_slots(len(blocks)))):
            if len(on_their_way) > RUNS_AHEAD - 1:
                outcomes += self._end_run(*on_their_way.popleft())
            writing = self._begin_run(number, run[0].slot, blocks[begun : begun + len(run)], fill)
            begun += len(run)
            on_their_way.append((writing, self._writes.submit(self._write_run, writing)))
        while on_their_way:
            outcomes += self._end_run(*on_their_way.popleft())
        reason = "the disk tier was closed" if self._closed else f"all {self.max_blocks} slots on the disk are taken"
        return outcomes + [TierError(reason) for _ in blocks[len(outcomes) :]]

    def _take_slots(self, count: int) -> list[_Place]:
        with self._lock:
            count = 0 if self._closed else min(count, len(self._free))
            return [_Place(slot, b"") for slot in sorted([self._free.pop() for _ in range(count)])]

    def remove(self, address: bytes) -> None:
        with self._lock:
            place = self._places.pop(address, None)
            if place is not None:
                self._free.append(place.slot)

    def clear(self) -> None:
        try:
            self._folder.begin_epoch()
        except OSError as error:
            raise TierIoError(f"the reset of {self._folder.path} cannot be kept: {error}") from error
        with self._lock:
            self._free += [place.slot for place in self._places.values()]
            self._places.clear()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._places.clear()
        self._reads.shutdown(wait=False, cancel_futures=True)
        self._writes.shutdown(wait=False, cancel_futures=True)
        with self._opening:
            for file in self._files.values():
                os.close(file)
            self._files.clear()
        self._folder.close()

    # --- runs of slots ---------------------------------------------------------------------------------

    def _runs(self, places: Sequence[_Place]) -> Iterator[list[_Place]]:
        """Yield places that lie behind each other, as many as are read or written at a time."""
        run: list[_Place] = []
        for place in places:
            if run and (
                place.slot != run[-1].slot + 1
                or place.slot % self._form.per_segment == 0
                or len(run) == self._run_blocks
            ):
                yield run
                run = []
            run.append(place)
        if run:
            yield run

    def _read_runs(self, runs: Sequence[list[_Place]]) -> Generator[tuple[list[_Place], Payload], None, None]:
        """Yield runs with the bytes of each block; the next ones are read meanwhile."""
        ahead = deque[Future[None]]()  # of runs `number` on, but for the first run, which nobody needs to read for us
        try:
            for number, run in enumerate(runs):
                for later in range(number + max(1, len(ahead)), min(number + RUNS_AHEAD + 1, len(runs))):
                    ahead.append(self._reads.submit(self._read_run, runs[later], self._payloads(later, runs[later])))
                payloads = self._payloads(number, run)
                if number == 0:
                    self._read_run(run, payloads)
                else:
                    ahead.popleft().result()
                yield run, payloads.reshape(len(run), -1)[:, : self.block_bytes]
        finally:
            wait([reading for reading in ahead if not reading.cancel()])  # they write into what the next load uses

    def _payloads(self, number: int, run: Sequence[object]) -> Payload:
        """Return the memory for the payloads of a run."""
        return self._memories.of(number).payloads[: len(run) * self._form.payload_bytes]

    def _read_run(self, run: Sequence[_Place], into: Payload) -> None:
        self._transfer(self._payloads_at(run[0].slot, len(run)), into, is_read=True)

    def _begin_run(self, number: int, first: int, blocks: Sequence[TierBlock], fill: Fill) -> _Writing:
        """Fill the memory of a run, to be written into the slots from `first` on."""
        count = len(blocks)
        whole = self._memories.of(number)
        memory = RunMemory(whole.headers[: count * self._form.header_bytes], self._payloads(number, blocks))
        headers, payloads = memory.headers.reshape(count, -1), memory.payloads.reshape(count, -1)
        payloads[:, self.block_bytes :] = 0
        filling = zip(blocks, payloads[:, : self.block_bytes], headers, strict=True)
        epoch = self._folder.epoch
        return _Writing(first, blocks, [self._fill(epoch, fill, *each) for each in filling], memory)

    def _write_run(self, writing: _Writing) -> None:
        """Write a run: the payloads, then the headers."""
        count = len(writing.blocks)
        self._transfer(self._payloads_at(writing.first, count), writing.memory.payloads, is_read=False)
        self._transfer(self._headers_at(writing.first, count), writing.memory.headers, is_read=False)

    def _end_run(self, writing: _Writing, written: Future[None]) -> list[Exception | None]:
        filled = writing.filled
        if (error := written.exception()) is not None:  # whatever it is: the slots are free again
            filled = [error if isinstance(error, Exception) else TierIoError(str(error))] * len(filled)
        slots = range(writing.first, writing.first + len(filled))
        with self._lock:
            return [self._keep(*each) for each in zip(slots, writing.blocks, filled, strict=True)]

    def _keep(self, slot: int, block: TierBlock, outcome: bytes | Exception) -> Exception | None:
        if isinstance(outcome, Exception):
            self._free.append(slot)
            return outcome
        self._places[block.address] = _Place(slot, outcome)
        return None

    def _fill(self, epoch: bytes, fill: Fill, block: TierBlock, payload: Payload, header: Payload) -> bytes | Exception:
        """Write a block and its header into the memory of a run; return its checksum, or why it is no block."""
        try:
            fill(block, payload)
            return write_header(header, block, self._fingerprint, epoch, time.time_ns(), payload)
        except Exception as error:
            header[:] = 0  # what lies in the slot now is no block
            return error

    def _headers_at(self, slot: int, count: int) -> SegmentPart:
        segment, number = divmod(slot, self._form.per_segment)
        return SegmentPart(segment, number * self._form.header_bytes, count * self._form.header_bytes)

    def _payloads_at(self, slot: int, count: int) -> SegmentPart:
        segment, number = divmod(slot, self._form.per_segment)
        offset = self._form.per_segment * self._form.header_bytes + number * self._form.payload_bytes
        return SegmentPart(segment, offset, count * self._form.payload_bytes)

    # --- files -----------------------------------------------------------------------------------------

    def _transfer(self, part: SegmentPart, data: Payload, *, is_read: bool) -> None:
        """Read or write a part of a segment, whole. Raise TierIoError."""
        try:
            count = self._call(self._file(part.segment), part.offset, data, is_read=is_read)
        except OSError as error:
            what = "read" if is_read else "written"
            raise TierIoError(f"KV blocks cannot be {what}: {error.strerror or error}") from error
        if count != part.num_bytes:
            raise TierIoError(f"{count} of {part.num_bytes} bytes of KV blocks were transferred")
        with self._lock:
            self.ios["direct" if self._is_direct else "buffered"] += 1

    def _call(self, file: int, offset: int, data: Payload, *, is_read: bool) -> int:
        work = self._io.read if is_read else self._io.write
        try:
            return work(file, data, offset)
        except OSError as error:
            if not self._is_direct or error.errno != errno.EINVAL:
                raise
        self._go_buffered()
        return work(file, data, offset)

    def _file(self, segment: int) -> int:
        """Return the open file of a segment, which is made and gets its space on first use."""
        with self._opening:
            if (file := self._files.get(segment)) is not None:
                return file
            if self._closed:
                raise TierError("the disk tier was closed")
            path = str(self._folder.segment(segment))
            flags, is_new = os.O_RDWR | os.O_CREAT, not os.path.exists(path)
            try:
                file = self._io.open(path, flags | (os.O_DIRECT if self._is_direct else 0))
            except OSError as error:
                if not self._is_direct or error.errno != errno.EINVAL:
                    raise
                self._is_direct = False
                self._say_buffered()
                file = self._io.open(path, flags)
            form = self._form
            slots = min(form.per_segment, self.max_blocks - segment * form.per_segment)
            try:
                self._io.allocate(file, form.per_segment * form.header_bytes + slots * form.payload_bytes)
            except BaseException:
                os.close(file)
                if is_new:  # the next start would want its space again
                    os.unlink(path)
                raise
            self._files[segment] = file
            return file

    def _go_buffered(self) -> None:
        """Continue through the page cache: the file system takes no direct I/O."""
        with self._opening:
            if self._is_direct:
                self._is_direct = False
                self._say_buffered()
            for file in self._files.values():
                fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)

    def _say_buffered(self) -> None:
        log.warning("%s takes no direct I/O: KV goes through the page cache", self._folder.path)

    # --- finding what is there -------------------------------------------------------------------------

    def _scan(self, until_s: float) -> set[int]:
        """Read the headers of all slots; return the slots with a block. The later of two equal blocks counts."""
        newest: dict[bytes, tuple[int, SlotBody]] = {}
        for segment in self._folder.segments():
            if segment * self._form.per_segment >= self.max_blocks:
                self._folder.segment(segment).unlink()  # the tier has become smaller
                continue
            for slot, body in self._scan_segment(segment, until_s):
                known = newest.get(body.address)
                if known is None or known[1].stamp < body.stamp:
                    newest[body.address] = (slot, body)
        self._places = {address: _Place(slot, body.payload_checksum) for address, (slot, body) in newest.items()}
        self.found = [(body.block(), body.stamp) for _, body in newest.values()]
        return {place.slot for place in self._places.values()}

    def _scan_segment(self, segment: int, until_s: float) -> Iterator[tuple[int, SlotBody]]:
        size, first = self._form.header_bytes, segment * self._form.per_segment
        count = min(self._form.per_segment, self.max_blocks - first)
        at_once = max(1, RUN_BYTES // size)
        buffer = whole_pages(at_once * size)
        for number in range(0, count, at_once):
            if time.monotonic() > until_s:
                log.warning("%s is too slow: KV blocks from slot %d on are lost", self._folder.path, first + number)
                return
            here = buffer[: min(at_once, count - number) * size]
            self._transfer(self._headers_at(first + number, here.nbytes // size), here, is_read=True)
            for i in range(here.nbytes // size):
                if (body := self._body(here[i * size : (i + 1) * size])) is not None:
                    yield first + number + i, body

    def _body(self, header: Payload) -> SlotBody | None:
        """Return what a header says; None if it was never written, or is not to be used: the slot is free."""
        try:
            body = read_header(header, self._fingerprint, self._folder.epoch)
        except TierCorruptError:
            return None
        return body if body.payload_bytes == self.block_bytes else None
