"""Track what engines of other packages compute KV with: the model, its settings and the adapters."""

import asyncio
from pathlib import Path

from kvmesh.kvcache.transfer.offers import check_content
from kvmesh.protocol.kv_content import PENDING, UNKNOWN
from kvmesh.protocol.messages import GenerateRequest
from kvmesh.workers.loaded_content import KvContent, LoadedContent, content_with


class EngineContent:
    """Hashes what such an engine loads. Belongs to one event loop; files are read in threads."""

    def __init__(self, place: str, *, has_weights: bool = True) -> None:
        """Take the model's folder. `has_weights`: False if the engine makes weights of its own."""
        self._place = place
        self._has_weights = has_weights
        self._model = LoadedContent(place, has_weights=has_weights)
        self._adapters: dict[str, str] = {}
        self._cached: tuple[str, KvContent] = ("", KvContent())

    async def begin(self) -> None:
        """Note the files before the engine reads them: when it starts, or wakes and reads them again."""
        self._model.close()
        self._model = LoadedContent(self._place, has_weights=self._has_weights)
        await asyncio.to_thread(self._model.begin)

    async def loaded(self, settings: str) -> None:
        """Take that the engine has read the files. `settings`: what changes KV beside them."""
        where = "" if self._model.has_files else self._place  # the engine finds the model by this name alone
        await asyncio.to_thread(self._model.loaded, f"{settings} {where}")

    def add_adapter(self, name: str, fingerprint: str) -> None:
        self._adapters[name] = fingerprint
        self._cached = ("", KvContent())

    def remove_adapter(self, name: str) -> None:
        self._adapters.pop(name, None)
        self._cached = ("", KvContent())

    def kv_content(self) -> KvContent:
        base = self._model.fingerprint
        if self._cached[0] != base:
            self._cached = (base, content_with(base, [*self._adapters.items()]))
        return self._cached[1]

    def check(self, request: GenerateRequest) -> None:
        """Raise TransferError if the request's ticket offers KV that was computed with something else."""
        if request.ticket is not None:
            check_content(request.ticket, self.kv_content().of(request.lora))

    def close(self) -> None:
        """Hash no more. A second call does nothing."""
        self._model.close()


class ServerContent:
    """Tracks what an attached server computes KV with, where the folder of its model is on this host."""

    def __init__(self) -> None:
        self._model: LoadedContent | None = None

    async def read(self, root: str) -> None:
        """Take where the server has its model from. It has read it before: a later change is not seen."""
        if root and Path(root).is_absolute() and await asyncio.to_thread(Path(root).is_dir):
            self._model = LoadedContent(root)
            await asyncio.to_thread(self._model.begin)
            await asyncio.to_thread(self._model.loaded, "attached")

    def kv_content(self) -> KvContent:
        return KvContent(UNKNOWN if self._model is None else self._model.fingerprint)

    def check(self, request: GenerateRequest) -> None:
        """Raise TransferError if the request's ticket offers KV that was computed with something else."""
        if request.ticket is not None:
            check_content(request.ticket, self.kv_content().of(request.lora))

    def close(self) -> None:
        if self._model is not None:
            self._model.close()


class AdapterFiles:
    """Hashes the files of one adapter while it is loaded: call `begin` before that, `loaded` after it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = LoadedContent(path)

    async def begin(self) -> None:
        await asyncio.to_thread(self._files.begin)

    async def loaded(self) -> str:
        """Return the fingerprint of what was loaded; PENDING if it cannot be known."""
        where = "" if self._files.has_files else self._path
        await asyncio.to_thread(self._files.loaded, where)
        return (await self._files.wait()).hex() or PENDING
