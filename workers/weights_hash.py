"""Hash all weights of a model, to tell them from others of the same name: whole files, each read once for many starts.

The hash of a file is kept in the user's cache folder, under all that a change of the file moves: its place on disk, its
size and the times of its last changes. The model's folder may be read-only, and so may the cache: then files are hashed
again.
"""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import xxhash

log = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".engine", ".plan", ".tensors", ".npz"
)  # fmt: skip
CONFIGS = frozenset(
    {"config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"}
    | {"adapter_config.json"}
)
HASH_THREADS = 4  # at most: one thread hashes 10 GB/s and more, storage answers several better than one
PIECE_BYTES = 64 << 20  # hashed by one thread
READ_BYTES = 1 << 20  # between two looks at whether to stop
FRESH_S = 2.0  # a file that was changed so lately may change again without another time: its hash is not kept
WAIT_S = 60.0  # for another process that hashes the same file; then it is hashed here too
POLL_S = 0.05
MAX_KEPT = 4096  # hashes in the cache folder
_HASH_BYTES = 16
_NICENESS = 10


class StoppedError(Exception):
    """The hash is not wanted any more."""


class ChangedError(OSError):
    """A file changed while it was hashed."""


class FileState(NamedTuple):
    """A file, and what any change of it moves. Links are followed."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @property
    def key(self) -> str:
        """Return the name under which the hash of this file is kept: the path does not count."""
        return blake2b(repr(self[1:]).encode(), digest_size=_HASH_BYTES).hexdigest()


def content_files(place: Path, *, has_weights: bool = True) -> list[FileState]:
    """Return the files of a model or an adapter that its KV depends on, by name. Raise OSError.

    `place`: a folder or a single file. A place that does not exist has none. `has_weights`: False for an engine that
    reads the configuration alone.
    """
    if not place.is_dir():
        return [_state_of(place)] if place.is_file() and has_weights else []
    return [_state_of(path) for path in sorted(place.iterdir()) if _counts(path.name, has_weights) and path.is_file()]


def _counts(name: str, has_weights: bool) -> bool:
    return name in CONFIGS or (has_weights and (name.endswith(WEIGHT_SUFFIXES) or name.endswith(".index.json")))


def _state_of(path: Path) -> FileState:
    return _state(str(path), path.stat())


def _state(path: str, found: os.stat_result) -> FileState:
    return FileState(path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def cache_folder() -> Path | None:
    """Return the folder where hashes are kept, made if need be. None: there is none that only this user can write."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if base.startswith("/") else Path.home() / ".cache") / "kvmesh" / "weights"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid():
            return None
        if found.st_mode & 0o077:
            folder.chmod(0o700)
    except (OSError, RuntimeError):  # RuntimeError: no home
        return None
    return folder


class WeightsHasher:
    """Hashes files in threads of its own. `close` ends them at the next piece."""

    def __init__(self, folder: Path | None, *, is_nice: bool = False, clock: Callable[[], float] = time.time) -> None:
        """Keep hashes in `folder`. `is_nice`: other threads go first."""
        self._folder = folder
        self._is_nice = is_nice
        self._clock = clock
        self._stop = threading.Event()

    def close(self) -> None:
        self._stop.set()

    def known(self, file: FileState) -> bytes | None:
        """Return the hash of a file that is kept; None: it has to be read."""
        if self._folder is None:
            return None
        with suppress(OSError, ValueError):
            key, digest, check = (self._folder / file.key).read_text("ascii")[:256].split()
            found = bytes.fromhex(digest)
            if key == file.key and check == _check(key, digest) and len(found) == _HASH_BYTES:
                return found
        return None

    def digest(self, file: FileState) -> bytes:
        """Return the hash of a file, and keep it. Raise OSError, ChangedError, StoppedError."""
        if (found := self.known(file)) is not None:
            return found
        with self._alone(file):
            if (found := self.known(file)) is not None:
                return found
            began = self._clock()
            found = self._read(file)
            if began - max(file.ctime_ns, file.mtime_ns) / 1e9 > FRESH_S:
                self._keep(file, found)
            return found

    @contextmanager
    def _alone(self, file: FileState) -> Iterator[None]:
        """Wait until no other process hashes this file, but not for ever: it may hang."""
        descriptor, lock = -1, None if self._folder is None else self._folder / f"{file.key}.lock"
        try:
            if lock is not None:
                with suppress(OSError):
                    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                    self._lock(descriptor)
            yield
        finally:
            if descriptor >= 0:
                os.close(descriptor)
            if lock is not None:
                with suppress(OSError):
                    lock.unlink()

    def _lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if self._stop.wait(POLL_S):
                    raise StoppedError from None

    def _read(self, file: FileState) -> bytes:
        """Hash a file in pieces, several at a time. Raise OSError, ChangedError, StoppedError."""
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _state(file.path, os.fstat(descriptor)) != file:
                raise ChangedError(f"{file.path} changed")
            pieces = self._digests(descriptor, range(0, file.size, PIECE_BYTES), file.size)
            if _state(file.path, os.fstat(descriptor)) != file:
                raise ChangedError(f"{file.path} changed while it was hashed")
        finally:
            os.close(descriptor)
        return blake2b(b"".join([file.size.to_bytes(8, "little"), *pieces]), digest_size=_HASH_BYTES).digest()

    def _digests(self, descriptor: int, offsets: Sequence[int], size: int) -> list[bytes]:
        """Hash the pieces that begin at `offsets`."""
        found: list[bytes] = [b""] * len(offsets)
        left = iter(enumerate(offsets))
        taking = threading.Lock()

        def work() -> None:
            if self._is_nice:
                _be_nice()
            buffer = bytearray(READ_BYTES)
            while True:
                with taking:
                    number, offset = next(left, (-1, 0))
                if number < 0:
                    return
                found[number] = self._piece(descriptor, offset, min(size, offset + PIECE_BYTES), buffer)

        threads = min(HASH_THREADS, len(os.sched_getaffinity(0)), len(offsets))
        others = [run_in_thread(work, "hash weights") for _ in range(threads - 1)]
        try:
            work()
        finally:
            for other in others:
                other.exception()  # it has ended: the descriptor may be closed
        for other in others:
            other.result()
        return found

    def _piece(self, descriptor: int, offset: int, end: int, buffer: bytearray) -> bytes:
        digest = xxhash.xxh3_128()
        view = memoryview(buffer)
        while offset < end:
            if self._stop.is_set():
                raise StoppedError
            count = os.preadv(descriptor, [view[: min(len(buffer), end - offset)]], offset)
            if not count:
                raise ChangedError("a file became shorter while it was hashed")
            digest.update(view[:count])
            offset += count
        return digest.digest()

    def _keep(self, file: FileState, digest: bytes) -> None:
        """Keep a hash where it can be kept; half of it is never seen."""
        if self._folder is None:
            return
        text = f"{file.key} {digest.hex()} {_check(file.key, digest.hex())}\n"
        fresh = self._folder / f"{file.key}.{os.getpid()}.{threading.get_native_id()}"
        try:
            fresh.write_text(text, "ascii")
            fresh.replace(self._folder / file.key)
            _tidy(self._folder)
        except OSError as error:
            log.debug("the hash of %s is not kept: %s", file.path, error)
            with suppress(OSError):
                fresh.unlink()


def files_digest(files: Sequence[FileState], hasher: WeightsHasher) -> bytes:
    """Return the hash of all files with their names. Raise OSError, ChangedError, StoppedError."""
    digest = blake2b(digest_size=_HASH_BYTES)
    for file in files:
        digest.update(f"{Path(file.path).name}\0{file.size}\0".encode(errors="surrogateescape"))
        digest.update(hasher.digest(file))
    return digest.digest()


def run_in_thread(work: Callable[[], object], name: str) -> Future[object]:
    """Run `work` in a thread that does not keep the process alive: a read from dead storage never returns."""
    done: Future[object] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def _be_nice() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _check(key: str, digest: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"1 {key} {digest}".encode())


def _tidy(folder: Path) -> None:
    """Remove the oldest hashes where there are too many."""
    kept = [entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    if len(kept) <= MAX_KEPT:
        return
    for entry in sorted(kept, key=lambda entry: entry.stat().st_mtime_ns)[: len(kept) - MAX_KEPT]:
        with suppress(OSError):
            os.unlink(entry.path)
