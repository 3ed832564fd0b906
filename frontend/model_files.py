"""Find a model's tokenizer and chat template: in the folder that its workers name, or at a worker.

Workers report the hashes of these files (`WorkerCard.model_files`). A folder of this host counts only if its files
have those hashes. Otherwise the files come from a worker, and are kept in a cache on disk, one folder per set of files.
Files of the cache and of workers are used only after their hashes were checked: the cache may be shared and lost.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import ConfigError, MeshError, UnreachableError, WireError
from kvmesh.protocol.messages import ModelFilePart, ModelFileRequest, WorkerCard
from kvmesh.protocol.model_files import MODEL_FILE_NAMES, ModelFile, fingerprint

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 60.0
NEW_SUFFIX = ".new"
LITTER_S = 3600.0  # a folder that is being written is younger


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvmesh" / "models"


class ModelFolders:
    """Finds the folder of a model, and fills the cache. `max_bytes` bounds the cache; the oldest sets go first."""

    def __init__(self, plane: PlaneClient, cache_dir: Path, max_bytes: int) -> None:
        self._plane = plane
        self._cache_dir = cache_dir
        self._max_bytes = max_bytes

    async def find(self, cards: Sequence[WorkerCard]) -> Path:
        """Return a folder with the files of these workers' model. Raises MeshError if no worker has them.

        The cards have the same files. Workers of an earlier version name no files: their folder has to be here.
        """
        files, path = cards[0].model_files, Path(cards[0].model_path)
        if not files or await asyncio.to_thread(has_files, path, files):
            return path
        check_names(files)
        kept = self._cache_dir / fingerprint(files)
        if await asyncio.to_thread(has_files, kept, files):
            with contextlib.suppress(OSError):  # the cache may be one that is only read here
                await asyncio.to_thread(os.utime, kept)
            return kept
        await self._fetch_all(cards, files, kept)
        return kept

    async def _fetch_all(self, cards: Sequence[WorkerCard], files: Sequence[ModelFile], kept: Path) -> None:
        new = kept.with_name(f"{kept.name}.{secrets.token_hex(4)}{NEW_SUFFIX}")
        try:
            await asyncio.to_thread(new.mkdir, parents=True)
            for file in files:
                data = await self._fetch(cards, file)
                await asyncio.to_thread((new / file.name).write_bytes, data)
            await asyncio.to_thread(put_in_place, new, kept, files)
            await asyncio.to_thread(shrink, self._cache_dir, self._max_bytes, kept)
        except OSError as error:
            found = f"cannot write the model cache {self._cache_dir}: {error.strerror or error}"
            raise ConfigError(found, hint="set --model-cache to a folder that can be written to") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, new, ignore_errors=True)
        log.info("fetched the tokenizer of %s from its workers into %s", cards[0].model, kept)

    async def _fetch(self, cards: Sequence[WorkerCard], file: ModelFile) -> bytes:
        """Return a file from the first worker that sends it as its hash says."""
        problem: MeshError = UnreachableError("no worker is there")
        for card in cards:
            try:
                return await self._fetch_from(card, file)
            except MeshError as error:
                problem = error
                log.warning("worker %s does not give %s: %s", card.worker_id, file.name, error)
        raise problem

    async def _fetch_from(self, card: WorkerCard, file: ModelFile) -> bytes:
        data = bytearray()
        asked = ModelFileRequest(sha256=file.sha256)
        async with self._plane.open(card.address, "model_file", asked, FETCH_TIMEOUT_S) as stream:
            async for part in stream.messages(ModelFilePart):
                data += part.data
                if len(data) > file.num_bytes:
                    raise WireError(f"{file.name} is longer than {file.num_bytes} bytes")
        if await asyncio.to_thread(sha256_of, data) != file.sha256:
            raise WireError(f"{file.name} of {len(data)} bytes does not have the hash that its card tells")
        return bytes(data)


def check_names(files: Sequence[ModelFile]) -> None:
    """Raise WireError for a file that no frontend reads: its name becomes part of a path."""
    if unknown := [file.name for file in files if file.name not in MODEL_FILE_NAMES]:
        raise WireError(f"a card names model files that are not known: {unknown[0]!r}")


def has_files(folder: Path, files: Sequence[ModelFile]) -> bool:
    """Return whether the folder has these files with these contents, and no further ones that would be read."""
    names = {file.name for file in files}
    try:
        if any((folder / name).exists() for name in MODEL_FILE_NAMES if name not in names):
            return False
        return all(
            (folder / file.name).stat().st_size == file.num_bytes
            and sha256_of((folder / file.name).read_bytes()) == file.sha256
            for file in files
        )
    except (OSError, ValueError):  # ValueError: the path that a card names may be no path
        return False


def sha256_of(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


def put_in_place(new: Path, kept: Path, files: Sequence[ModelFile]) -> None:
    """Move a set of files to its place. A whole set that is there already stays, because others read it."""
    if has_files(kept, files):
        return
    shutil.rmtree(kept, ignore_errors=True)
    try:
        new.rename(kept)
    except OSError:
        if not kept.is_dir():
            raise


def shrink(cache_dir: Path, max_bytes: int, kept: Path) -> None:
    """Remove the sets that were used longest ago until the cache is small enough; never `kept`.

    What a killed frontend has left half written goes too. Another process may remove folders at the same time.
    """
    used_s: dict[Path, float] = {}
    sizes: dict[Path, int] = {}
    for folder in cache_dir.iterdir():
        with contextlib.suppress(OSError):
            changed_s = folder.stat().st_mtime
            if folder.name.endswith(NEW_SUFFIX):
                if time.time() - changed_s > LITTER_S:
                    shutil.rmtree(folder, ignore_errors=True)
            elif folder.is_dir():
                sizes[folder] = sum(file.stat().st_size for file in folder.iterdir())
                used_s[folder] = changed_s
    total = sum(sizes.values())
    for folder in sorted(sizes, key=lambda folder: used_s[folder]):
        if total > max_bytes and folder != kept:
            shutil.rmtree(folder, ignore_errors=True)
            total -= sizes[folder]
