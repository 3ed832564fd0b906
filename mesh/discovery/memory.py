"""Discovery within one process, for tests and for a mesh that is a single process."""

from collections.abc import AsyncIterator

from kvmesh.mesh.discovery.board import Board, Change
from kvmesh.mesh.discovery.place import SearchPlace
from kvmesh.mesh.discovery.store import Registration


class MemoryDiscovery:
    """All parts of the process share one object. A lease is the process itself."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lapsed: set[str] = set()
        self._board = Board()

    async def put(self, key: str, value: bytes) -> Registration:
        self._values[key] = value
        self._lapsed = self._lapsed - {key}
        self._show()
        return Registration(key, self._withdraw)

    def remove(self, key: str, *, has_lapsed: bool = False) -> None:
        """Remove a key, as its owner or as the end of its lease."""
        self._values.pop(key, None)
        self._lapsed = {*self._lapsed, key} if has_lapsed else self._lapsed - {key}
        self._show()

    def _show(self) -> None:
        self._board.show(dict(self._values), self._lapsed)

    async def _withdraw(self, key: str) -> None:
        self.remove(key)

    def watch(self, prefix: str) -> AsyncIterator[Change]:
        return self._board.watch(prefix)

    def where(self) -> SearchPlace:
        return SearchPlace("this process", is_read=True)

    async def close(self) -> None:
        self._board.close()
