"""Decide which frontend owns the budget of a key: the same one wherever the same frontends are known. Pure."""

import math
from collections import deque
from collections.abc import Mapping

from xxhash import xxh3_64_intdigest

REMEMBERED_S = 60.0  # a frontend that was lost, because what it granted counts for so long
MAX_LOST = 1024


class Owners:
    """Tracks the frontends that share limits, and finds the owner of each key."""

    def __init__(self, own: str) -> None:
        """Begin alone; `own` is the name of this frontend."""
        self.own = own
        self.version = 0  # changes with the members
        self._present: dict[str, str] = {}  # addresses by name
        self._counted: Mapping[str, str] = {}
        self.changed_at = -math.inf
        self._lost: deque[tuple[float, str]] = deque(maxlen=MAX_LOST)

    def put(self, now: float, name: str, address: str) -> None:
        """Take a frontend in, or note its new address."""
        self._present[name] = address
        self._count(now)

    def remove(self, now: float, name: str) -> None:
        """Note that a frontend is gone."""
        if self._present.pop(name, None) is not None and name != self.own:
            self._lost.append((now, name))
        self._count(now)

    def _count(self, now: float) -> None:
        """Update the members, unless this frontend is missing: then it is discovery that does not know."""
        if self.is_joined and self._present != self._counted:
            self._counted = dict(self._present)
            self.version += 1
            self.changed_at = now

    @property
    def is_joined(self) -> bool:
        """Return whether discovery shows this frontend. Otherwise it is cut off, and others may own its keys."""
        return self.own in self._present

    @property
    def count(self) -> int:
        """Return how many frontends share the limits, this one included."""
        return max(1, len(self._counted))

    def owner(self, key: str) -> str:
        """Return the name of the frontend that owns the budget of a key; "" if this one is cut off."""
        if not self.is_joined:
            return ""
        return max(self._counted, key=lambda name: _score(name, key))

    def address(self, name: str) -> str:
        return self._counted.get(name, "")

    def lost_at(self, now: float, key: str) -> float | None:
        """Return when the last frontend was lost that owned a key before this one did; None if there was none."""
        while self._lost and self._lost[0][0] < now - REMEMBERED_S:
            self._lost.popleft()
        own = _score(self.own, key)
        return max((time for time, name in self._lost if _score(name, key) > own), default=None)


def _score(name: str, key: str) -> tuple[int, str]:
    return xxh3_64_intdigest(f"{name}\0{key}".encode()), name
