"""Disks that fail as a test says, and what is put on them."""

import errno
import os
import threading
from pathlib import Path

from kvmesh.kvcache.tiers.address import content_address, root_address
from kvmesh.kvcache.tiers.disk import DiskStore, SystemIo, form_of
from kvmesh.kvcache.tiers.folder import FolderForm, own_folder
from kvmesh.kvcache.tiers.index import TierBlock
from kvmesh.kvcache.tiers.store import Payload, TierStore
from kvmesh.protocol.hashing import sequence_hashes

BLOCK, BLOCK_BYTES = 4, 5000
FINGERPRINT = b"\xab" * 32


def form(fingerprint: bytes = FINGERPRINT, max_blocks: int = 200) -> FolderForm:
    return form_of(fingerprint, BLOCK_BYTES, BLOCK, max_blocks)


class FailingIo(SystemIo):
    """An operating system whose calls fail with `errors`, by the name of the call."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.short = False  # transfer less than was asked for
        self.written: list[int] = []  # offsets

    def _fail(self, call: str) -> None:
        if number := self.errors.get(call):
            raise OSError(number, os.strerror(number))

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_DIRECT and self.errors.get("direct"):
            raise OSError(errno.EINVAL, "no direct I/O here")
        self._fail("open")
        return super().open(path, flags)

    def allocate(self, file: int, num_bytes: int) -> None:
        self._fail("allocate")
        super().allocate(file, num_bytes)

    def read(self, file: int, into: Payload, offset: int) -> int:
        self._fail("read")
        return super().read(file, into[: len(into) // 2] if self.short else into, offset)

    def write(self, file: int, data: Payload, offset: int) -> int:
        self._fail("write")
        self.written.append(offset)
        return super().write(file, data[: len(data) // 2] if self.short else data, offset)


class SlowWrites(SystemIo):
    """An operating system whose writes wait while a test says so."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.may_write.set()

    def write(self, file: int, data: Payload, offset: int) -> int:
        self.may_write.wait()
        return super().write(file, data, offset)


def open_store(
    path: Path, max_blocks: int = 200, io: SystemIo | None = None, fingerprint: bytes = FINGERPRINT
) -> DiskStore:
    return DiskStore(own_folder(path, form(fingerprint, max_blocks)), max_blocks, BLOCK_BYTES, io)


def chain(number: int, blocks: int, salt: str | None = None) -> list[TierBlock]:
    """Return the blocks of a prompt, named as the mesh names them."""
    tokens = [number, *range(1, BLOCK * blocks)]
    address, made = root_address(FINGERPRINT, None, salt), list[TierBlock]()
    for i, name in enumerate(sequence_hashes(tokens, BLOCK)):
        part = tuple(tokens[i * BLOCK : (i + 1) * BLOCK])
        address = content_address(address, part)
        made.append(TierBlock(name, made[-1].name if made else None, address, part, None, salt))
    return made


def payload_of(block: TierBlock) -> bytes:
    """Return the bytes of a block: its address, again and again."""
    return (block.address * (BLOCK_BYTES // 32 + 1))[:BLOCK_BYTES]


def put(store: TierStore, blocks: list[TierBlock]) -> None:
    """Store blocks; raise the first error."""

    def fill(block: TierBlock, payload: Payload) -> None:
        payload[:] = memoryview(payload_of(block))

    for error in store.store(blocks, fill):
        if error is not None:
            raise error


def read(store: TierStore, block: TierBlock) -> bytes:
    got: list[bytes] = []
    store.load([block.address], lambda payload: got.append(payload.tobytes()))
    return got[0]


class RawSlot:
    """The bytes of a slot, behind the store's back."""

    def __init__(self, path: Path, slot: int, *, is_header: bool) -> None:
        """Take the folder of the setting. The slot lies in the first segment of the first folder there."""
        found = form()
        self._file = path / "0" / "segment-00000"
        header, payload = found.header_bytes, found.payload_bytes
        self._offset = slot * header if is_header else found.per_segment * header + slot * payload
        self._size = header if is_header else payload

    def read(self) -> bytes:
        with self._file.open("rb") as file:
            file.seek(self._offset)
            return file.read(self._size)

    def write(self, data: bytes, offset: int = 0) -> None:
        with self._file.open("r+b") as file:
            file.seek(self._offset + offset)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def flip(self, place: int, bit: int) -> None:
        """Turn one bit over."""
        self.write(bytes([self.read()[place] ^ 1 << bit]), place)
