"""Serve LoRA adapters by vLLM: which content stands behind a name, and when vLLM may forget it.

vLLM keys its prefix cache by an adapter's name and path, so an adapter that was loaded again with other weights would
reuse the KV of the old ones. Here vLLM gets a name that contains a hash of the adapter's files. Requests, cards and
KV events of the mesh use the name that clients know.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.workers.engines.external.cache import RankCache
from kvmesh.workers.engines.external.content import EngineContent
from kvmesh.workers.engines.vllm.driver import Driver, LoadedAdapter
from kvmesh.workers.weights_hash import FileState, WeightsHasher, cache_folder, content_files, files_digest


@dataclass(frozen=True, slots=True)
class _Served:
    adapter: LoadedAdapter
    files: Sequence[FileState]  # as they were when vLLM read them


class Adapters:
    """The adapters of one vLLM. Belongs to one event loop."""

    def __init__(self, model: str, driver: Driver, caches: Sequence[RankCache], content: EngineContent) -> None:
        """`model` is the name that no adapter may have. `caches` announce the blocks of each rank.

        `content` learns the fingerprints of the adapters that are served.
        """
        self._model = model
        self._driver = driver
        self._caches = caches
        self._content = content
        self._served: dict[str, _Served] = {}
        self._numbers = itertools.count(1)
        self._requests: Counter[int] = Counter()  # in flight, by the adapter's number
        self._unloaded: dict[int, LoadedAdapter] = {}  # that requests still use
        self._changing = asyncio.Lock()
        self._removals: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._served)

    async def load(self, name: str, path: str) -> None:
        """Serve the adapter in the folder `path` as `name`. Raise InvalidRequestError if it cannot be loaded.

        vLLM's engine dies of a request whose adapter it cannot load, so only loaded ones are served.
        """
        async with self._changing:
            if name == self._model or name in self._served:
                raise InvalidRequestError(f"{name!r} is served already", hint="choose another name", param="name")
            try:
                files, digest = await asyncio.to_thread(_read, path)
            except OSError as error:
                raise InvalidRequestError(f"cannot load adapter {name!r}: {error}", param="path") from error
            adapter = LoadedAdapter(f"{name}@{digest[:16]}", next(self._numbers), path)
            await self._driver.add_adapter(adapter)
            if await self._has_changed(path, files):
                await self._driver.remove_adapter(adapter)
                raise InvalidRequestError(
                    f"the files of adapter {name!r} changed while they were read", hint="load it again", param="path"
                )
            for cache in self._caches:
                cache.serve_adapter(name, adapter.name)
            self._content.add_adapter(name, digest)
            self._served[name] = _Served(adapter, files)

    async def unload(self, name: str) -> None:
        """Serve `name` no longer. Requests in flight keep the adapter until they end. Raise InvalidRequestError."""
        async with self._changing:
            if (served := self._served.pop(name, None)) is None:
                raise InvalidRequestError(f"there is no adapter {name!r}", param="name")
            self._content.remove_adapter(name)
            if self._requests[served.adapter.number]:
                self._unloaded[served.adapter.number] = served.adapter
            else:
                await self._driver.remove_adapter(served.adapter)

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[LoadedAdapter | None]:
        """Keep the adapter `name` loaded while the block runs. Raise InvalidRequestError if it is not served."""
        if name is None:
            yield None
            return
        if (served := self._served.get(name)) is None:
            raise InvalidRequestError(f"there is no adapter {name!r} on this worker", param="model")
        number = served.adapter.number
        self._requests[number] += 1
        try:
            await self._check_rereading(name, served)
            yield served.adapter
        finally:
            self._end_request(number)

    async def close(self) -> None:
        for task in self._removals:
            task.cancel()
        await asyncio.gather(*self._removals, return_exceptions=True)

    def _end_request(self, number: int) -> None:
        self._requests[number] -= 1
        if self._requests[number]:
            return
        del self._requests[number]
        if (adapter := self._unloaded.pop(number, None)) is not None:
            task = asyncio.create_task(self._driver.remove_adapter(adapter), name=f"remove adapter {adapter.name}")
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    async def _check_rereading(self, name: str, served: _Served) -> None:
        """Raise InvalidRequestError if vLLM may read the adapter's files again, and they are not those it had read.

        vLLM does so with more adapters than it keeps in memory.
        """
        if len(self._served) + len(self._unloaded) <= self._driver.facts.kept_adapters:
            return
        if await self._has_changed(served.adapter.path, served.files):
            raise InvalidRequestError(
                f"the files of adapter {name!r} have changed since it was loaded",
                hint="unload it and load it again",
                param="model",
            )

    async def _has_changed(self, path: str, files: Sequence[FileState]) -> bool:
        try:
            return await asyncio.to_thread(_files_of, path) != files
        except OSError:
            return True


def _files_of(path: str) -> Sequence[FileState]:
    return content_files(Path(path).expanduser())


def _read(path: str) -> tuple[Sequence[FileState], str]:
    """Return the files of an adapter's folder and their hash, hexadecimal. Blocks while it reads; raises OSError."""
    files = _files_of(path)
    if not files:
        raise FileNotFoundError(f"{path} has no files of an adapter")
    return files, files_digest(files, WeightsHasher(cache_folder())).hex()
