"""Show in discovery which workers of this host are down, and which are started again when they end.

Frontends report the first, and let a request wait for the second.
"""

import asyncio
import logging
from collections.abc import Iterable

from kvmesh.mesh.discovery import Discovery, Registration
from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.ids import new_generation
from kvmesh.protocol.messages import DownCard, KeptCard, Message, encode

log = logging.getLogger(__name__)

DOWN = "down/"
KEPT = "kept/"


class OwnerNotices:
    """The notices of one owner of workers. Methods may be called at any time; `run` carries them out."""

    def __init__(self) -> None:
        self._wanted: dict[str, Message] = {}
        self._kept_key = f"{KEPT}{new_generation():x}"
        self._changed = asyncio.Event()

    def show_down(self, card: DownCard) -> None:
        self._want(DOWN + card.name, card)

    def withdraw_down(self, name: str) -> None:
        self._want(DOWN + name, None)

    def keep(self, names: Iterable[str]) -> None:
        """Show that exactly these workers are started again when they end."""
        self._want(self._kept_key, KeptCard(workers=tuple(sorted(names))))

    def _want(self, key: str, card: Message | None) -> None:
        if self._wanted.get(key) == card:
            return
        if card is None:
            del self._wanted[key]
        else:
            self._wanted[key] = card
        self._changed.set()

    async def run(self, discovery: Discovery) -> None:
        """Keep discovery as the notices are, until cancelled."""
        shown: dict[str, tuple[Message, Registration]] = {}
        while True:
            await self._changed.wait()
            self._changed.clear()
            for key in [key for key in shown if key not in self._wanted]:
                await shown.pop(key)[1].withdraw()
            for key, card in list(self._wanted.items()):
                if key not in shown or shown[key][0] != card:
                    try:
                        shown[key] = card, await discovery.put(key, encode(card))
                    except MeshError as error:
                        log.warning("discovery does not show the notice %s: %s", key, error)
