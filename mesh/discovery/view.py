"""Decide which keys count. Pure: what a backend has read and the time go in, the keys that watchers see come out.

A key leaves in one of two ways. Its owner withdraws it: the value becomes empty before the key goes. Or its lease
lapses: the owner has died, or it could not reach the place where the keys are. Watchers may ask the owner then.
"""

from collections.abc import Mapping

MAX_LAPSED = 65_536  # keys remembered as lapsed; of more, the oldest are forgotten


class KeyView:
    """Track the keys of one discovery backend. Times are seconds of one monotonic clock."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._present: dict[str, bytes] = {}
        self._missing_since_s: dict[str, float] = {}  # keys that the latest list did not have
        self._lapsed: dict[str, None] = {}  # in the order in which they lapsed

    def on_list(self, found: Mapping[str, bytes], now_s: float) -> None:
        """Take a list of all keys. A key that is not in it counts for one more lease, so that its owner can return.

        A server that was restarted without its data has no key at all until the owners have noticed.
        """
        for key in self._present:
            if key not in found:
                self._missing_since_s.setdefault(key, now_s)
        for key, value in found.items():
            self.on_put(key, value)

    def on_away(self) -> None:
        """Take that the backend no longer answers: no lease counts until the next list."""
        self._missing_since_s.clear()

    def on_put(self, key: str, value: bytes) -> None:
        self._missing_since_s.pop(key, None)
        self._lapsed.pop(key, None)
        if value:
            self._present[key] = value
        else:
            self._present.pop(key, None)

    def on_lapse(self, key: str) -> None:
        """Take the end of a lease. Does nothing for a key that its owner has withdrawn."""
        self._missing_since_s.pop(key, None)
        if self._present.pop(key, None) is None:
            return
        self._lapsed[key] = None
        if len(self._lapsed) > MAX_LAPSED:
            del self._lapsed[next(iter(self._lapsed))]

    def on_time(self, now_s: float) -> None:
        """Let keys lapse that have been missing for a whole lease."""
        for key in [key for key, since_s in self._missing_since_s.items() if now_s - since_s >= self._lease_s]:
            self.on_lapse(key)

    def present(self) -> dict[str, bytes]:
        return dict(self._present)

    def lapsed(self) -> frozenset[str]:
        return frozenset(self._lapsed)
