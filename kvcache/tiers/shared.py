"""Keep blocks where other workers find them: in a folder that several hosts mount, or in an object store.

A worker knows what is there from listings, which it makes again and again (`refresh`); to find a block waits for
nothing. An object holds blocks of one prefix behind each other (`kvcache/tiers/bundle.py`), is written once, and proves
itself. One worker at a time removes what is old or too much. A reset begins another epoch, for all workers of a model.
"""

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmesh.kvcache.tiers.bundle import HEAD_BYTES, bundle_name, chains, head_bytes, pack_head, read_head
from kvmesh.kvcache.tiers.catalog import BlockPlace, Catalog, NamedBlock
from kvmesh.kvcache.tiers.collect import SharedLimits, lease_to_write, to_collect
from kvmesh.kvcache.tiers.index import TierBlock
from kvmesh.kvcache.tiers.objects import ABSENT, MissingObjectError, Objects, StoredObject
from kvmesh.kvcache.tiers.slots import SlotBody, checksum, pack_header
from kvmesh.kvcache.tiers.store import Payload, TierCorruptError, TierError, TierIoError

log = logging.getLogger(__name__)

AT_ONCE = 4  # reads of one load, and of one refresh
COLLECT_EVERY_S = 60.0
EPOCH_BYTES = 32
LEASE = "lease"

Fill = Callable[[TierBlock, Payload], object]


class SharedNews(NamedTuple):
    """Report what a listing has shown."""

    found: list[tuple[TierBlock, int]]  # with their stamps, parents first
    gone: list[NamedBlock]
    is_cleared: bool  # another epoch has begun: all from before is gone
    collected_bytes: int = 0  # that this worker has removed


class SharedStore:
    """A tier of at most `max_blocks` blocks that this worker knows of, in storage that it shares."""

    def __init__(
        self, objects: Objects, fingerprint: bytes, block_bytes: int, max_blocks: int, limits: SharedLimits
    ) -> None:
        """Take the storage. What is there is not known before the first `refresh`. Raise TierError."""
        self.max_blocks, self.block_bytes = max_blocks, block_bytes
        self.ios = Counter[str]()
        self._objects = objects
        self._fingerprint, self._model = fingerprint, fingerprint.hex()[:32]
        self._catalog = Catalog(max_blocks, limits.num_bytes, block_bytes)
        self._collector = _Collector(objects, limits)
        self._counting = threading.Lock()
        self._beside = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="tier shared")
        try:
            self._catalog.begin(self._read_epoch())
        except BaseException:
            self.close()
            raise

    @property
    def list_every_s(self) -> float:
        """Return how often the storage should be listed."""
        return self._objects.list_every_s

    def find(self, address: bytes) -> bool:
        return address in self._catalog

    def remove(self, address: bytes) -> None:
        """Forget a block. Its object stays for the other workers, until it is collected."""
        self._catalog.forget_block(address)

    def clear(self) -> None:
        """Begin another epoch: all workers of this model forget what was stored, and it is collected."""
        epoch = secrets.token_bytes(EPOCH_BYTES)
        self._objects.put(self._epoch_name, [epoch], None)
        self._catalog.begin(epoch)

    def close(self) -> None:
        self._catalog.close()
        self._beside.shutdown(wait=False, cancel_futures=True)
        self._objects.close()

    # --- loading ---------------------------------------------------------------------------------------

    def load(self, addresses: Sequence[bytes], take: Callable[[Payload], object]) -> None:
        places = self._catalog.places(addresses)
        for part, data in self._read_ahead(list(_parts(places, self.block_bytes))):
            for number, place in enumerate(part):
                payload = data[number * self.block_bytes : (number + 1) * self.block_bytes]
                if payload.nbytes != self.block_bytes or checksum(payload.data) != place.checksum:
                    self._note_damage(place)
                    raise TierCorruptError("the bytes of a KV block in shared storage are damaged")
                take(payload)
        if len(places) < len(addresses):
            raise TierError("shared storage does not hold the block any more")
        for name in self._catalog.to_touch({place.name for place in places}):
            self._objects.touch(name)

    def _read_ahead(self, parts: Sequence[list[BlockPlace]]) -> Iterator[tuple[list[BlockPlace], Payload]]:
        """Yield parts with their bytes; the next ones are read meanwhile."""
        reading: deque[Future[Payload]] = deque()
        try:
            for number, part in enumerate(parts):
                while len(reading) < AT_ONCE and number + len(reading) < len(parts):
                    reading.append(self._beside.submit(self._read_part, parts[number + len(reading)]))
                yield part, reading.popleft().result()
        finally:
            for one in reading:
                one.cancel()

    def _read_part(self, part: Sequence[BlockPlace]) -> Payload:
        name = part[0].name
        try:
            data = self._objects.read(name, part[0].offset, len(part) * self.block_bytes)
        except MissingObjectError:
            self._catalog.lose(name)
            raise
        self._count_io()
        return np.frombuffer(data, np.uint8)

    def _note_damage(self, place: BlockPlace) -> None:
        """Forget an object whose bytes are wrong, and remove it, so that its blocks can be stored again.

        It is not removed if it is another one than this worker knew: that one may be right.
        """
        self._catalog.lose(place.name)
        try:
            if not self._was_replaced(place):
                self._objects.remove(place.name)
        except TierIoError as error:
            log.warning("a damaged object stays in shared storage: %s", error)

    def _was_replaced(self, place: BlockPlace) -> bool:
        """Return whether an object has other checksums now than this worker knew, or is gone. Raise TierIoError."""
        try:
            bodies, begin = self._read_head(self._catalog.epoch, place.name.rsplit("/", 1)[-1])
        except MissingObjectError:
            return True
        except TierCorruptError:
            return False
        number = (place.offset - begin) // self.block_bytes
        return 0 <= number < len(bodies) and bodies[number].payload_checksum != place.checksum

    # --- storing ---------------------------------------------------------------------------------------

    def store(self, blocks: Sequence[TierBlock], fill: Fill) -> list[Exception | None]:
        outcomes: list[Exception | None] = []
        for chain in chains(blocks, self.block_bytes):
            outcomes += self._store_chain(chain, fill)
        return outcomes

    def _store_chain(self, chain: Sequence[TierBlock], fill: Fill) -> list[Exception | None]:
        """Store blocks as one object. A block that cannot be filled ends it, and takes those after it along."""
        if (refused := self._catalog.refusal(len(chain))) is not None:
            return [refused] * len(chain)
        payloads = np.empty((len(chain), self.block_bytes), np.uint8)
        filled, failed = _fill(chain, payloads, fill)
        outcomes: list[Exception | None] = [None] * filled
        if filled:
            try:
                self._store_object(chain[:filled], payloads[:filled])
            except TierError as error:
                outcomes = [error] * filled
        return outcomes + [failed] * (len(chain) - filled)

    def _store_object(self, chain: Sequence[TierBlock], payloads: NDArray[np.uint8]) -> None:
        """Store an object, or take note of the equal one that is there already. Raise TierError."""
        epoch, stamp = self._catalog.epoch, time.time_ns()
        name = bundle_name(chain)
        full = self._folder(epoch) + name
        packed = [
            pack_header(block, self._fingerprint, epoch, stamp, payload)
            for block, payload in zip(chain, payloads, strict=True)
        ]
        head = pack_head([header for header, _ in packed])
        for _ in range(2):
            if self._objects.put(full, [head, payloads.data], ABSENT):
                self._count_io()
                self._catalog.learn(epoch, full, len(head), chain, [checksum for _, checksum in packed])
                return
            try:
                bodies, begin = self._read_head(epoch, name)
                if [body.address for body in bodies] != [block.address for block in chain]:
                    raise TierCorruptError("an object of KV blocks is not what its name says")
            except TierCorruptError:  # it would be in the way for ever
                self._objects.remove(full)
            except MissingObjectError:
                continue  # it was collected just now
            else:
                self._catalog.learn(epoch, full, begin, chain, [body.payload_checksum for body in bodies])
                return
        raise TierError("shared storage has a damaged object of the same name")

    # --- following what others do ----------------------------------------------------------------------

    def refresh(self, until_s: float) -> SharedNews:
        """List what is there, read the heads of new objects until `time.monotonic()` is `until_s`, and collect.

        Raise TierError if the storage cannot be listed or read.
        """
        epoch = self._read_epoch()
        is_cleared = epoch != self._catalog.epoch
        if is_cleared:
            self._catalog.begin(epoch)
        known = self._catalog.names()
        listed = {one.name: one for one in self._objects.listing(self._folder(epoch))}
        gone = self._catalog.take_lost() + self._catalog.forget(known - listed.keys())
        found = self._read_new([one for name, one in listed.items() if name not in known], epoch, until_s)
        over = self._collector.collect(self._folder(epoch), is_urgent=self._catalog.is_full)
        self._catalog.is_full = False
        gone += self._catalog.forget([one.name for one in over])
        return SharedNews(found, gone, is_cleared, sum([one.num_bytes for one in over]))

    def _read_new(self, objects: Sequence[StoredObject], epoch: bytes, until_s: float) -> list[tuple[TierBlock, int]]:
        """Read the heads of objects, those that were written first, first."""
        found: list[tuple[TierBlock, int]] = []
        ordered = self._latest(objects)
        for first in range(0, len(ordered), AT_ONCE):
            if time.monotonic() > until_s:
                break  # the others are new the next time, too
            some = ordered[first : first + AT_ONCE]
            for blocks in self._beside.map(self._read_object, some, [epoch] * len(some)):
                found += blocks
        return found

    def _latest(self, objects: Sequence[StoredObject]) -> list[StoredObject]:
        """Return the latest objects that this worker has memory for, the oldest of them first; pass over the others."""
        chosen, blocks = list[StoredObject](), 0
        for one in sorted(objects, key=lambda each: -each.used_s):
            blocks += max(1, one.num_bytes // self.block_bytes)
            if blocks <= self.max_blocks:
                chosen.append(one)
            else:
                self._catalog.learn_empty(one.name, one.num_bytes)
        return chosen[::-1]

    def _read_object(self, one: StoredObject, epoch: bytes) -> list[tuple[TierBlock, int]]:
        """Take note of an object of another worker. One that is damaged has no blocks."""
        try:
            bodies, begin = self._read_head(epoch, one.name.rsplit("/", 1)[-1])
            blocks = [body.block() for body in bodies]
            self._catalog.learn(epoch, one.name, begin, blocks, [body.payload_checksum for body in bodies])
        except TierCorruptError:
            self._catalog.learn_empty(one.name, one.num_bytes)
            return []
        except TierIoError:
            raise
        except TierError:  # it was collected, or the epoch has ended
            return []
        return [(block, body.stamp) for block, body in zip(blocks, bodies, strict=True)]

    def _read_head(self, epoch: bytes, name: str) -> tuple[list[SlotBody], int]:
        """Return what the headers of an object say, and where its payloads begin. Raise TierError."""
        full = self._folder(epoch) + name
        start = self._objects.read(full, 0, HEAD_BYTES)
        if (length := head_bytes(start)) > len(start):
            start += self._objects.read(full, len(start), length - len(start))
        return read_head(name, start[:length], self._fingerprint, epoch, self.block_bytes), length

    # --- inside ----------------------------------------------------------------------------------------

    def _folder(self, epoch: bytes) -> str:
        return f"{self._model}/{epoch.hex()[:32]}/"

    @property
    def _epoch_name(self) -> str:
        return f"{self._model}/epoch"

    def _read_epoch(self) -> bytes:
        """Return the present epoch of this model, which begins when the first worker asks for it."""
        for _ in range(3):
            found = self._objects.get(self._epoch_name)
            if found is not None and len(found[0]) == EPOCH_BYTES:
                return found[0]
            self._objects.put(self._epoch_name, [secrets.token_bytes(EPOCH_BYTES)], found[1] if found else ABSENT)
        raise TierIoError("shared storage does not keep what is written there")

    def _count_io(self) -> None:
        with self._counting:
            self.ios[self._objects.label] += 1


class _Collector:
    """Removes what is old or too much, if no other worker does."""

    def __init__(self, objects: Objects, limits: SharedLimits) -> None:
        self._objects = objects
        self._limits = limits
        self._holder = secrets.token_hex(16)
        self._collected_s = -COLLECT_EVERY_S  # time.monotonic

    def collect(self, folder: str, *, is_urgent: bool) -> list[StoredObject]:
        """Return the objects that were removed. `folder`: that of the worker's objects."""
        now, removed = time.monotonic(), list[StoredObject]()
        if not is_urgent and now - self._collected_s < COLLECT_EVERY_S:
            return removed
        self._collected_s = now
        try:
            if self._has_lease():
                for one in to_collect(self._objects.listing(""), self._limits, time.time(), folder):
                    self._objects.remove(one.name)
                    removed.append(one)
        except TierIoError as error:  # it may be read only for this worker
            log.warning("nothing is removed from shared storage: %s", error)
        return removed

    def _has_lease(self) -> bool:
        found = self._objects.get(LEASE)
        mine = lease_to_write(None if found is None else found[0], self._holder, time.time())
        return mine is not None and self._objects.put(LEASE, [mine], ABSENT if found is None else found[1])


def _fill(chain: Sequence[TierBlock], payloads: NDArray[np.uint8], fill: Fill) -> tuple[int, Exception | None]:
    """Fill payloads; return how many were filled, and why the next one was not."""
    for number, (block, payload) in enumerate(zip(chain, payloads, strict=True)):
        try:
            fill(block, payload)
        except Exception as error:  # whatever it is: it is this block's
            return number, error
    return len(chain), None


def _parts(places: Sequence[BlockPlace], block_bytes: int) -> Iterator[list[BlockPlace]]:
    """Yield places that lie behind each other in one object."""
    for _, same in groupby(places, key=lambda place: place.name):
        part: list[BlockPlace] = []
        for place in same:
            if part and place.offset != part[-1].offset + block_bytes:
                yield part
                part = []
            part.append(place)
        yield part
