"""Show in discovery which workers of this host are down, so that a frontend can report them."""

import asyncio
import logging

from mesh.discovery import Discovery, Registration
from protocol.errors import MeshError
from protocol.messages import DownCard, encode

log = logging.getLogger(__name__)

PREFIX = "down/"


class DownNotices:
    """The workers that keep ending. `show` and `withdraw` may be called at any time; `run` carries them out."""

    def __init__(self) -> None:
        self._down: dict[str, DownCard] = {}
        self._changed = asyncio.Event()

    def show(self, card: DownCard) -> None:
        self._down[card.name] = card
        self._changed.set()

    def withdraw(self, name: str) -> None:
        if self._down.pop(name, None) is not None:
            self._changed.set()

    async def run(self, discovery: Discovery) -> None:
        """Keep discovery as the notices are, until cancelled."""
        shown: dict[str, tuple[DownCard, Registration]] = {}
        while True:
            await self._changed.wait()
            self._changed.clear()
            for name in [name for name, (card, _) in shown.items() if self._down.get(name) != card]:
                await shown.pop(name)[1].withdraw()
            for name, card in list(self._down.items()):
                if name not in shown:
                    try:
                        shown[name] = card, await discovery.put(PREFIX + name, encode(card))
                    except MeshError as error:
                        log.warning("discovery does not show that %s is down: %s", name, error)
