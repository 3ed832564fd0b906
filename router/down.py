"""Follow which workers their owner has found to end again and again: they have no card of their own."""

import logging

from kvmesh.mesh.discovery import Deleted, Discovery, Put
from kvmesh.protocol.errors import WireError
from kvmesh.protocol.messages import DownCard, decode
from kvmesh.router.findings import IgnoredKey, writable

log = logging.getLogger(__name__)

KEY_PREFIX = "down/"
MAX_DOWN = 32  # workers that are remembered; further ones are in their owner's log
MAX_NAME_CHARS = 100


class DownWorkers:
    """The workers that are down, by key of discovery."""

    def __init__(self) -> None:
        self._down: dict[str, DownCard] = {}

    def __len__(self) -> int:
        return len(self._down)

    def on_change(self, change: Put | Deleted) -> None:
        if isinstance(change, Deleted):
            self._down.pop(change.key, None)
        elif change.key in self._down or len(self._down) < MAX_DOWN:
            try:
                self._down[change.key] = decode(change.value, DownCard)
            except WireError as error:
                log.warning("a notice that cannot be read at %s: %s", writable(change.key[:MAX_NAME_CHARS]), error)

    def report(self) -> list[IgnoredKey]:
        return [
            IgnoredKey(
                writable(card.name[:MAX_NAME_CHARS]),
                f"this {card.role.value} worker ends again and again; its owner tries it every {card.retry_s:.0f} s",
            )
            for card in self._down.values()
        ]

    async def run(self, discovery: Discovery) -> None:
        """Follow until cancelled."""
        async for change in discovery.watch(KEY_PREFIX):
            self.on_change(change)
