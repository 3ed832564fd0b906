"""Keep many deadlines on one timer of the event loop. Every request has deadlines, and nearly none is reached."""

import asyncio
from collections.abc import Sequence
from math import inf
from typing import Protocol

from kvmesh.mesh.safeguards import is_off

_IS_OFF = is_off("deadline")
GRAIN_S = 0.02  # no deadline expires later than that


class Expires(Protocol):
    def expire(self) -> None:
        """The deadline has come."""
        ...


class Deadlines:
    """Expires each entry when its time has come, up to GRAIN_S late, by the clock of one event loop.

    Entries lie in slots of GRAIN_S. The timer stays set when the first slot becomes empty, so it sometimes rings for an
    empty slot.
    """

    def __init__(self) -> None:
        self._slots: dict[int, set[Expires]] = {}
        self._rings_at: float = inf  # a slot's number
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._slots.values())

    def add(self, deadline: float, entry: Expires) -> int:
        """Add an entry; return the number of its slot, which `discard` needs."""
        if _IS_OFF:
            return -1
        slot = int(deadline / GRAIN_S) + 1
        entries = self._slots.get(slot)
        if entries is None:
            self._slots[slot] = {entry}
            if slot < self._rings_at:
                self._set_timer(slot)
        else:
            entries.add(entry)
        return slot

    def discard(self, slot: int, entry: Expires) -> None:
        """Remove an entry, if it has not expired."""
        entries = self._slots.get(slot)
        if entries is not None:
            entries.discard(entry)
            if not entries:
                del self._slots[slot]

    def expire_all(self) -> None:
        """Expire all entries now."""
        self._expire(list(self._slots))

    def _set_timer(self, slot: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at = slot
        self._timer = asyncio.get_running_loop().call_at(slot * GRAIN_S, self._ring)

    def _ring(self) -> None:
        self._timer, self._rings_at = None, inf
        now = asyncio.get_running_loop().time()
        self._expire([slot for slot in self._slots if slot * GRAIN_S <= now])
        if self._slots and self._timer is None:
            self._set_timer(min(self._slots))

    def _expire(self, slots: Sequence[int]) -> None:
        expired = [entry for slot in slots for entry in self._slots.pop(slot)]
        for entry in expired:
            entry.expire()
