"""The content of the KV of an engine: which weights it has loaded, and what else changes KV.

The hash is made beside loading, and a worker with large weights may serve before it is known. The files must be the
same before loading, after it and after hashing; else nobody can say which weights were loaded.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from kvmesh.kvcache.transfer.offers import with_content
from kvmesh.protocol.errors import StaleCardError, kind_of
from kvmesh.protocol.kv_content import MAX_ADAPTERS, PENDING, UNKNOWN, content_of, mismatch
from kvmesh.protocol.messages import Delta
from kvmesh.workers.weights_hash import (
    FileState,
    StoppedError,
    WeightsHasher,
    cache_folder,
    content_files,
    files_digest,
    run_in_thread,
)

log = logging.getLogger(__name__)

QUICK_BYTES = 64 << 20  # are hashed before loading: that takes no time


@dataclass(frozen=True, slots=True)
class KvContent:
    """The content of an engine's KV, as its card says it."""

    fingerprint: str = UNKNOWN
    adapters: tuple[tuple[str, str], ...] = ()
    kv_print: str = ""

    def of(self, lora: str | None) -> str:
        """Return the fingerprint for the requests of one adapter, or of none."""
        return content_of(self.fingerprint, self.adapters, lora)


NOT_YET = KvContent(PENDING)


@runtime_checkable
class KnowsContent(Protocol):
    """An engine that knows what its KV was computed with."""

    def kv_content(self) -> KvContent: ...


class LoadedContent:
    """Fingerprints what one load read: call `begin` before it, `loaded` after it. Both block for milliseconds."""

    def __init__(self, place: str | Path, *, has_weights: bool = True) -> None:
        """Take the folder, or the file, of a model or an adapter."""
        self._place = Path(place or os.devnull)  # "": there is none
        self._has_weights = has_weights
        self._before: Sequence[FileState] = ()
        self._hasher: WeightsHasher | None = None
        self._lock = threading.Lock()
        self._files: bytes | None = None  # the hash of all files
        self._settings: str | None = None
        self._end: Future[bytes] = Future()  # b"": it cannot be known

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint, or PENDING: also where it cannot be known, since the weights may be any."""
        return self.digest.hex() or PENDING

    @property
    def has_files(self) -> bool:
        return bool(self._before)

    @property
    def digest(self) -> bytes:
        """Return the fingerprint as bytes; b"" while it is not known."""
        return self._end.result() if self._end.done() else b""

    def begin(self) -> None:
        """Note the files as they are before they are read, and begin to hash them."""
        try:
            self._before = content_files(self._place, has_weights=self._has_weights)
        except OSError as error:
            self._give_up(f"its files cannot be read: {error}")
            return
        cache = cache_folder() if self._before else None
        self._hasher = WeightsHasher(cache)
        unknown = sum(file.size for file in self._before if self._hasher.known(file) is None)
        if unknown <= QUICK_BYTES:
            self._hash(self._hasher)
            return
        log.info("hashing %.1f GB of weights: until then this worker exchanges no KV", unknown / 1e9)
        self._hasher = WeightsHasher(cache, is_nice=True)
        run_in_thread(partial(self._hash, self._hasher), "hash weights")

    def loaded(self, settings: str) -> None:
        """Take that the load has ended. `settings`: what changes KV beside the files, such as its dtype."""
        with self._lock:
            self._settings = settings
        self._finish()

    async def wait(self) -> bytes:
        """Wait until the fingerprint is known, and return it; b"" if it cannot be known."""
        return await asyncio.shield(asyncio.wrap_future(self._end))

    def close(self) -> None:
        """Hash no more. A second call does nothing."""
        if self._hasher is not None:
            self._hasher.close()

    def _hash(self, hasher: WeightsHasher) -> None:
        try:
            digest = files_digest(self._before, hasher)
        except StoppedError:
            return
        except OSError as error:
            self._give_up(str(error))
            return
        except Exception as error:  # a bug: the worker serves without exchanging KV
            log.exception("the weights of %s were not hashed", self._place)
            self._give_up(kind_of(error))
            return
        with self._lock:
            self._files = digest
        self._finish()

    def _finish(self) -> None:
        """Decide, once the files are hashed and loaded."""
        with self._lock:
            files, settings = self._files, self._settings
        if files is None or settings is None:
            return
        try:
            after = content_files(self._place, has_weights=self._has_weights)
        except OSError as error:
            self._give_up(str(error))
            return
        if after != self._before:
            self._give_up("they changed while they were loaded or hashed")
            return
        self._decide(blake2b(f"1 {files.hex()} {settings}".encode(), digest_size=16).digest())

    def _decide(self, digest: bytes) -> None:
        """Keep the first decision: two threads may come to it."""
        with self._lock:
            if not self._end.done():
                self._end.set_result(digest)

    def _give_up(self, why: str) -> None:
        self._decide(b"")
        log.error(
            "the weights of %s are not known: %s; this worker exchanges no KV until it starts or wakes again",
            self._place,
            why,
        )


def check_card(chosen_by: str, content: KvContent, lora: str | None) -> None:
    """Raise StaleCardError for a request whose worker was chosen by other weights than it has now.

    `chosen_by` is the content that the worker's card had. The answer would begin, or go on, with tokens of another
    model than the rest of it.
    """
    if chosen_by in (UNKNOWN, PENDING):
        return
    ours = content_of(content.fingerprint, content.adapters[:MAX_ADAPTERS], lora)  # as a card says it
    if mismatch(chosen_by, ours):
        raise StaleCardError(
            f"this worker has other weights ({ours[:12]}) than its card said ({chosen_by[:12]})", hint="try again"
        )


def with_ticket_content(delta: Delta, before: str, now: str) -> Delta:
    """Return a part of an answer whose ticket, if it has one, says what its KV was computed with.

    `before` is the content when the request began: if an adapter was replaced since, its KV may be of both.
    """
    if delta.ticket is None:
        return delta
    ticket = with_content(delta.ticket, now if now == before else PENDING)
    return msgspec.structs.replace(delta, ticket=ticket)


def with_adapter(content: str, adapter: str) -> str:
    """Return the fingerprint of an adapter on weights: known where both are."""
    if PENDING in (content, adapter):
        return PENDING
    return blake2b(f"{content} {adapter}".encode(), digest_size=16).hexdigest() if content and adapter else UNKNOWN


def content_with(content: str, adapters: Sequence[tuple[str, str]], kv_print: str = "") -> KvContent:
    """Return the content of an engine with adapters, each with the fingerprint of its own files."""
    combined = [(name, with_adapter(content, own)) for name, own in adapters]
    return KvContent(content, tuple(combined), kv_print)
