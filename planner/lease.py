"""Let one planner act at a time: the one whose card in discovery is the oldest."""

import asyncio
import os
import secrets
import time
from collections.abc import Callable

from kvmesh.mesh.discovery import Discovery, Put, Registration
from kvmesh.protocol.errors import WireError
from kvmesh.protocol.messages import PlannerCard, decode, encode_card

SETTLE_S = 1.0  # after this time, the card of a planner that started in the same moment is visible
PREFIX = "planners/"


class Lease:
    """The right to act. It is ours while no key is before our own."""

    def __init__(self, discovery: Discovery, card: PlannerCard, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._discovery = discovery
        self._card = card
        self.key = f"{PREFIX}{wall_ns():020d}-{secrets.token_hex(4)}"
        self._present: dict[str, PlannerCard | None] = {}
        self._registration: Registration | None = None
        self._visible_at_s: float | None = None

    async def hold(self) -> None:
        """Put up our card and follow the cards of others, until cancelled or the watch ends."""
        self._registration = await self._discovery.put(self.key, encode_card(self._card))
        try:
            async for change in self._discovery.watch(PREFIX):
                if isinstance(change, Put):
                    self._present[change.key] = _read(change.value)
                else:
                    self._present.pop(change.key, None)
                if self.key not in self._present:
                    self._visible_at_s = None
                elif self._visible_at_s is None:
                    self._visible_at_s = asyncio.get_running_loop().time()
        finally:
            await self._registration.withdraw()

    def is_ours(self, at_s: float) -> bool:
        """Return whether we may act at `at_s` of the loop's clock."""
        is_first = bool(self._present) and min(self._present) == self.key
        return is_first and self._visible_at_s is not None and at_s - self._visible_at_s >= SETTLE_S

    def holder(self) -> str:
        """Return the name of the planner that acts, "" if it is ours."""
        if not self._present or min(self._present) == self.key:  # ours, as soon as nobody has objected
            return ""
        card = self._present[min(self._present)]
        return "another planner" if card is None else f"{card.name} (pid {card.pid})"


def card_of(name: str, metrics_url: str, record_file: str, connector: str) -> PlannerCard:
    return PlannerCard(
        name=name, pid=os.getpid(), metrics_url=metrics_url, record_file=record_file, connector=connector
    )


def _read(value: bytes) -> PlannerCard | None:
    try:
        return decode(value, PlannerCard)
    except WireError:
        return None
