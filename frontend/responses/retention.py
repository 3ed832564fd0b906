"""Decide which stored responses are kept: not too many, not too large together, not too old. Pure."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct


class StoreLimits(Struct, frozen=True, kw_only=True):
    max_count: int = 10_000
    max_bytes: int = 1 << 30
    ttl_s: float = 86_400.0  # after a response was stored or last continued


class KeptEntry(NamedTuple):
    """Describes one stored response as the limits see it."""

    name: str
    size_bytes: int
    used_s: float  # when it was stored or last continued


class Dropped(NamedTuple):
    """The names of responses that have to go, by the reason."""

    expired: list[str]
    crowded_out: list[str]

    @property
    def names(self) -> list[str]:
        return self.expired + self.crowded_out


class Retention:
    """Keeps account of the stored responses. The least recently used goes first.

    Invariant: after `put` and `drop_old`, the entries are within the limits.
    """

    def __init__(self, limits: StoreLimits) -> None:
        self.limits = limits
        self.total_bytes = 0
        self._entries: OrderedDict[str, KeptEntry] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, name: str, size_bytes: int, now_s: float) -> Dropped:
        """Add or replace an entry; return what has to go for it. An entry above the limit goes itself."""
        self.remove(name)
        self._add(KeptEntry(name, size_bytes, now_s))
        return self.drop_old(now_s)

    def use(self, name: str, now_s: float) -> None:
        """Make an entry the most recently used one; do nothing if it is unknown."""
        if (entry := self._entries.get(name)) is not None:
            self._entries[name] = entry._replace(used_s=now_s)
            self._entries.move_to_end(name)

    def remove(self, name: str) -> None:
        if (entry := self._entries.pop(name, None)) is not None:
            self.total_bytes -= entry.size_bytes

    def replace_all(self, entries: Iterable[KeptEntry]) -> None:
        """Forget all entries and take these, in any order."""
        self._entries.clear()
        self.total_bytes = 0
        for entry in sorted(entries, key=lambda entry: (entry.used_s, entry.name)):
            self._add(entry)

    def is_expired(self, used_s: float, now_s: float) -> bool:
        return now_s - used_s > self.limits.ttl_s

    def drop_old(self, now_s: float) -> Dropped:
        """Remove and return the names of what is too old or too much."""
        dropped = Dropped([], [])
        while self._entries:
            name, entry = next(iter(self._entries.items()))
            if self.is_expired(entry.used_s, now_s):
                dropped.expired.append(name)
            elif len(self._entries) > self.limits.max_count or self.total_bytes > self.limits.max_bytes:
                dropped.crowded_out.append(name)
            else:
                break
            self.remove(name)
        return dropped

    def _add(self, entry: KeptEntry) -> None:
        self._entries[entry.name] = entry
        self.total_bytes += entry.size_bytes
