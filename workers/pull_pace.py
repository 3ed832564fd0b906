"""Decide when a KV pull is late, and when it is given up. Pure; the time is a parameter.

A pull from a peer that hangs, or that the network does not reach, would take its whole timeout, while computing the
prompt takes a moment. What pulls took so far says how long one may take. A pull that is late has its peer asked on
the request plane: a peer that does not answer there will send nothing either.
"""

from dataclasses import dataclass

LATE_S = 0.4  # a pull that takes longer than this, and than is usual, has its peer asked
ANSWER_S = 0.8  # time to answer
ASK_AGAIN_S = 0.5
TIMES_USUAL = 4.0  # longer than the pulls so far makes a pull late
TIMES_HOPELESS = 16.0  # ... makes it worth nothing, even from a peer that answers
HOPELESS_S = 2.0  # but no pull is given up earlier for that
FORGET = 0.95  # what a pull leaves of the slowest one before


@dataclass(slots=True)
class PullPace:
    """Track how long pulls take for each token."""

    timeout_s: float
    slowest_token_s: float = 0.0  # of the latest pulls
    pulls: int = 0

    def note(self, tokens: int, took_s: float) -> None:
        """Take a pull that has brought `tokens`."""
        if tokens > 0:
            self.slowest_token_s = max(took_s / tokens, self.slowest_token_s * FORGET)
            self.pulls += 1

    def usual_s(self, tokens: int) -> float:
        return tokens * self.slowest_token_s

    def late_s(self, tokens: int) -> float:
        """Return after how long the peer of a pull is asked."""
        return min(max(LATE_S, TIMES_USUAL * self.usual_s(tokens)), self.timeout_s)

    def limit_s(self, tokens: int) -> float:
        """Return after how long a pull is given up although its peer answers."""
        if not self.pulls:
            return self.timeout_s
        return min(max(HOPELESS_S, TIMES_HOPELESS * self.usual_s(tokens)), self.timeout_s)
