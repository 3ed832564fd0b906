"""Decide when an engine makes no progress any more although its process answers. Pure; the time is a parameter.

A worker whose engine hangs ends its streams with an error, so that they continue elsewhere, and then ends itself, so
that its owner starts it again.
"""

from dataclasses import dataclass

from kvmesh.mesh.safeguards import is_off

_IS_OFF = is_off("progress_watch")
MOST_GAP_S = 2.0  # between two looks that counts: a process that was stopped for longer has not seen its engine hang
TIMES_LONGER = 4.0  # than the steps before, so that a slow machine is not taken for a hung engine
STEP_STALL_S = 10.0
HESITATES_S = 1.5  # its answers continue on other workers, and the step may still end
ANSWER_STALL_S = 120.0  # an engine with its own scheduler may compute one long prompt for as long


@dataclass(slots=True)
class _Running:
    """Something that has to make progress, and the time that it has made none."""

    tokens: int
    began_s: float
    looked_s: float
    age_s: float = 0.0

    def look(self, now_s: float) -> float:
        self.age_s += min(now_s - self.looked_s, MOST_GAP_S)
        self.looked_s = now_s
        return self.age_s


class StepWatch:
    """Watch the steps of an engine, one after the other.

    A step hangs after `least_s`, or after four times what the steps so far make likely, whichever is longer. 0: never.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = 0.0 if _IS_OFF else least_s
        self._running: _Running | None = None
        self._longest_s = 0.0
        self._most_tokens = 0  # of a step so far
        self._token_s = 0.0  # time per token of the largest step so far

    def begin(self, tokens: int, now_s: float) -> None:
        self._running = _Running(tokens, now_s, now_s)

    def end(self, now_s: float) -> None:
        """Take the end of the step that has begun last; without one, do nothing."""
        if (step := self._running) is None:
            return
        self._running = None
        took_s = now_s - step.began_s
        self._longest_s = max(self._longest_s, took_s)
        if step.tokens >= self._most_tokens:
            self._most_tokens, self._token_s = step.tokens, took_s / max(step.tokens, 1)

    def limit_s(self, tokens: int) -> float:
        """Return how long a step of so many tokens may take."""
        return max(self._least_s, self._likely_s(tokens))

    def _likely_s(self, tokens: int) -> float:
        return TIMES_LONGER * max(self._longest_s, tokens * self._token_s)

    def age_s(self, now_s: float) -> float:
        """Return how long the running step takes already, 0 between steps."""
        return 0.0 if self._running is None else max(0.0, now_s - self._running.began_s)

    def hesitates(self) -> bool:
        """Return whether the running step takes far longer than it should, by the last call of `hangs`."""
        step = self._running
        if step is None or not self._least_s:
            return False
        return step.age_s > max(min(HESITATES_S, self._least_s), self._likely_s(step.tokens))

    def hangs(self, now_s: float) -> str:
        """Return what hangs, "" for nothing. Call this about once a second."""
        step = self._running
        if step is None or not self._least_s or step.look(now_s) <= self.limit_s(step.tokens):
            return ""
        return f"a step of {step.tokens} tokens has not ended for {step.age_s:.0f} s"


class AnswerWatch:
    """Watch the answers of an engine with its own scheduler: with requests in hand, some answer must advance."""

    def __init__(self, least_s: float) -> None:
        self._least_s = 0.0 if _IS_OFF else least_s
        self._has_news = False
        self._waiting: _Running | None = None

    def note(self) -> None:
        """Take a part of an answer."""
        self._has_news = True

    def age_s(self) -> float:
        """Return for how long no answer has advanced, by the last call of `hangs`."""
        return 0.0 if self._waiting is None else self._waiting.age_s

    def hangs(self, requests: int, now_s: float) -> str:
        """Return what hangs, "" for nothing. Call this about once a second with the number of requests in hand."""
        if not requests or not self._least_s or self._has_news:
            self._has_news, self._waiting = False, None
            return ""
        if self._waiting is None:
            self._waiting = _Running(0, now_s, now_s)
        if self._waiting.look(now_s) <= self._least_s:
            return ""
        return f"none of {requests} requests has had a token for {self._waiting.age_s:.0f} s"
