"""Discovery within one process: for tests and for a mesh that is a single process."""

from collections.abc import AsyncIterator

from mesh.discovery.board import Board, Change


class MemoryDiscovery:
    """All parts of the process share one object. A lease is the process itself."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._board = Board()

    async def put(self, key: str, value: bytes) -> "_Registration":
        self._values[key] = value
        self._board.show(dict(self._values))
        return _Registration(self, key)

    def remove(self, key: str) -> None:
        self._values.pop(key, None)
        self._board.show(dict(self._values))

    def watch(self, prefix: str) -> AsyncIterator[Change]:
        return self._board.watch(prefix)

    async def close(self) -> None:
        self._board.close()


class _Registration:
    def __init__(self, discovery: MemoryDiscovery, key: str) -> None:
        self._discovery = discovery
        self._key = key

    async def withdraw(self) -> None:
        self._discovery.remove(self._key)
