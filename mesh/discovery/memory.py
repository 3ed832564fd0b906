"""Discovery within one process, for tests and for a mesh that is a single process."""

from collections.abc import AsyncIterator

from mesh.discovery.board import Board, Change
from mesh.discovery.store import Registration


class MemoryDiscovery:
    """All parts of the process share one object. A lease is the process itself."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._board = Board()

    async def put(self, key: str, value: bytes) -> Registration:
        self._values[key] = value
        self._board.show(dict(self._values))
        return Registration(key, self._withdraw)

    def remove(self, key: str) -> None:
        self._values.pop(key, None)
        self._board.show(dict(self._values))

    async def _withdraw(self, key: str) -> None:
        self.remove(key)

    def watch(self, prefix: str) -> AsyncIterator[Change]:
        return self._board.watch(prefix)

    async def close(self) -> None:
        self._board.close()
