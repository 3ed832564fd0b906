"""Decide which log records are left out, so that no peer can fill a disk with lines of one kind. Pure.

A kind is the place in the code that logs, with its level and the type of its exception. The first lines of a kind are
all written. A kind that goes on gets a line now and then, and a summary says how many were left out.
"""

from collections.abc import Hashable
from dataclasses import dataclass

BURST = 50  # lines of one kind that may come at once
PER_S = 2.0  # ... and then in each second
SUMMARY_S = 10.0  # after the first line that is left out
MOST_KINDS = 4096  # that are remembered


@dataclass(slots=True)
class _Kind:
    allowance: float
    seen_s: float
    left_out: int = 0


class LogFlood:
    """Track how many lines of each kind were written lately."""

    def __init__(self, burst: float = BURST, per_s: float = PER_S) -> None:
        self._burst = burst
        self._per_s = per_s
        self._kinds: dict[Hashable, _Kind] = {}
        self.waits_for_summary = False

    def passes(self, kind: Hashable, now_s: float) -> bool:
        """Return whether a line of this kind is written."""
        known = self._kinds.get(kind)
        if known is None:
            if len(self._kinds) >= MOST_KINDS:
                self._forget_quiet(now_s)
            known = self._kinds[kind] = _Kind(self._burst, now_s)
        known.allowance = min(self._burst, known.allowance + (now_s - known.seen_s) * self._per_s)
        known.seen_s = now_s
        if known.allowance >= 1:
            known.allowance -= 1
            return True
        known.left_out += 1
        self.waits_for_summary = True
        return False

    def _forget_quiet(self, now_s: float) -> None:
        """Forget kinds that have their whole burst again, or else all that have left out nothing."""
        full_s = self._burst / self._per_s
        quiet = [kind for kind, known in self._kinds.items() if now_s - known.seen_s > full_s and not known.left_out]
        for kind in quiet or [kind for kind, known in self._kinds.items() if not known.left_out]:
            del self._kinds[kind]

    def summary(self) -> list[tuple[Hashable, int]]:
        """Return how many lines of which kinds were left out since the last summary."""
        self.waits_for_summary = False
        told = [(kind, known.left_out) for kind, known in self._kinds.items() if known.left_out]
        for kind, _ in told:
            self._kinds[kind].left_out = 0
        return told
