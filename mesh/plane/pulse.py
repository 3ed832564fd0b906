"""Decide when a peer is asked for a sign of life, and when it has been silent for too long. Pure.

The kernel of a peer answers for a process that hangs, and a proxy answers for a host that is gone. Only an answer of
the peer itself proves that it lives. So it is asked again and again while calls are open, also while it sends: packets
may be lost in one direction only.

A call that could run elsewhere is worth little patience: it is `hasty`. Of a peer without such a call, fewer questions
are asked and more silence is borne. A peer that has been slow to answer lately gets more time, because it is busy.
"""

from dataclasses import dataclass
from enum import Enum, auto

MOST_TICKS = 2  # that count when the next look is late: a process that was stopped has not seen its peer silent
TIMES_LATER = 3.0  # than the slowest of the latest answers may the next one be
FORGET = 0.8  # what an answer leaves of the slowest one before


class Act(Enum):
    NOTHING = auto()
    ASK = auto()
    GIVE_UP = auto()


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """Say how long a peer may be silent."""

    tick_s: float  # between two looks
    ask_s: float  # between two questions
    silent_s: float  # without a byte, before the peer is given up
    unanswered_s: float  # ... and a question must have been open for so long
    deaf_s: float  # a question may be open while the peer sends: it does not hear us
    backlog_bytes: int  # so much may be on its way before the answer


HASTY = SilenceLimits(tick_s=0.25, ask_s=0.75, silent_s=2.0, unanswered_s=1.5, deaf_s=2.25, backlog_bytes=4 << 20)
CALM = SilenceLimits(tick_s=5.0, ask_s=5.0, silent_s=15.0, unanswered_s=10.0, deaf_s=15.0, backlog_bytes=64 << 20)


class Pulse:
    """Track the signs of life of one peer while calls are open. Times are those of one monotonic clock."""

    def __init__(self) -> None:
        self._looked_s = 0.0
        self.silent_s = 0.0  # this and all other spans count only the time in which this process ran
        self._since_asked_s = 0.0
        self._is_asked = False  # the last question is open
        self._bytes_since = 0  # ... heard since it was asked
        self._slowest_s = 0.0  # of the latest answers
        self.heard_bytes = 0  # since the last look: counted by whoever reads, because a call for each read would cost

    def begin(self, now_s: float) -> None:
        """Watch from now on, after a time without calls."""
        self._looked_s = now_s
        self.silent_s = self._since_asked_s = 0.0
        self._is_asked, self.heard_bytes = False, 1

    def answered(self) -> None:
        """Take the answer to the open question."""
        if self._is_asked:
            self._is_asked = False
            self._slowest_s = max(self._since_asked_s, self._slowest_s * FORGET)

    def look(self, patience: SilenceLimits, now_s: float) -> Act:
        """Return what is to be done now. Call it every `patience.tick_s`."""
        passed_s = min(now_s - self._looked_s, MOST_TICKS * patience.tick_s)
        self._looked_s = now_s
        heard, self.heard_bytes = self.heard_bytes, 0
        self._bytes_since += heard
        self.silent_s = 0.0 if heard else self.silent_s + passed_s
        self._since_asked_s += passed_s
        if not self._is_asked:
            if self._since_asked_s < (patience.ask_s if heard else patience.ask_s / 2):
                return Act.NOTHING
            self._is_asked, self._since_asked_s, self._bytes_since = True, 0.0, 0
            return Act.ASK
        later_s = TIMES_LATER * self._slowest_s
        is_silent = self.silent_s >= max(patience.silent_s, later_s) and self._since_asked_s >= patience.unanswered_s
        is_deaf = self._since_asked_s >= max(patience.deaf_s, later_s) and self._bytes_since <= patience.backlog_bytes
        return Act.GIVE_UP if is_silent or is_deaf else Act.NOTHING
