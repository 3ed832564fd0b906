"""Decide when a quiet engine is asked for a token, to see that it still gives one. Pure; the time is a parameter.

An engine that hangs with requests in hand is found by them (workers/stall.py). One that hangs while nobody asks would
be found by the first caller, who then waits. The canary is that first caller.
"""

CANARY_INTERVAL_S = 60.0
CANARY_PATIENCE_S = 30.0  # at least: a machine may stand still


class CanaryWatch:
    """Track when an engine was last seen to answer. `interval_s` 0: a quiet engine is left alone."""

    def __init__(self, interval_s: float, patience_s: float, now_s: float) -> None:
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._heard_s = now_s
        self._asked_s: float | None = None

    def note(self, now_s: float) -> None:
        """Take any sign that the engine answers."""
        self._heard_s, self._asked_s = now_s, None

    def quiet_s(self, now_s: float) -> float:
        return now_s - self._heard_s

    def is_due(self, requests: int, now_s: float) -> bool:
        """Return whether to ask the engine now. The caller then asks, and calls `note` with the answer."""
        if not self._interval_s or requests or self._asked_s is not None or self.quiet_s(now_s) < self._interval_s:
            return False
        self._asked_s = now_s
        return True

    def hangs(self, now_s: float) -> str:
        """Return what hangs, "" for nothing."""
        if self._asked_s is None or now_s - self._asked_s <= self._patience_s:
            return ""
        return f"a request for one token has not been answered for {now_s - self._asked_s:.0f} s"
