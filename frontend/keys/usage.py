"""Report what API keys have used: as metrics, and as a line a minute in the log."""

import asyncio
import logging

from kvmesh.frontend.keys import metrics
from kvmesh.mesh.tally import Tally

log = logging.getLogger(__name__)

PERIOD_S = 60.0  # between lines of one key, while it is used
MAX_LINES = 1000  # a period, those of the keys with most tokens; the metrics have all


class Usage:
    """Counts what one key uses."""

    __slots__ = ("_log", "_outcomes", "_tallies", "completion_tokens", "name", "prompt_tokens", "refused", "requests")

    def __init__(self, name: str, log: "UsageLog") -> None:
        self.name = name
        self._log = log
        self._outcomes: dict[str, Tally] = {}
        self._tallies: tuple[Tally, Tally] | None = None  # once it has used something: many keys are never used
        self.reset()

    def reset(self) -> None:
        """Begin the next line."""
        self.requests = self.prompt_tokens = self.completion_tokens = self.refused = 0

    def count(self, outcome: str) -> None:
        """Count one request that has ended."""
        if (tally := self._outcomes.get(outcome)) is None:
            tally = self._outcomes[outcome] = metrics.REQUESTS.labels(self.name, outcome)
        tally.inc()
        self.requests += 1
        self._log.note(self)

    def add(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count tokens."""
        if self._tallies is None:
            self._tallies = metrics.TOKENS.labels(self.name, "prompt"), metrics.TOKENS.labels(self.name, "completion")
        prompts, answers = self._tallies
        prompts.inc(prompt_tokens)
        answers.inc(completion_tokens)
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self._log.note(self)

    def refuse(self, limit: str) -> None:
        """Count one request that was over a limit."""
        metrics.REFUSED.labels(self.name, limit).inc()
        self.refused += 1
        self._log.note(self)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class UsageLog:
    """Writes a line for each key that was used in a period. Without use no timer runs."""

    def __init__(self) -> None:
        self._used: set[Usage] = set()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, usage: Usage) -> None:
        """Write of this key when the period ends."""
        self._used.add(usage)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self.write)

    def write(self) -> None:
        """Write the lines of this period now."""
        used, self._used, self._timer = self._used, set(), None
        for usage in sorted(used, key=lambda usage: -usage.tokens)[:MAX_LINES]:
            log.info(
                "usage",
                extra={
                    "key": usage.name,
                    "requests": usage.requests,
                    "prompt_tokens": usage.prompt_tokens,
                    "completion_tokens": usage.completion_tokens,
                    "refused": usage.refused,
                },
            )
        if len(used) > MAX_LINES:
            log.warning("%d more keys were used: see the metrics", len(used) - MAX_LINES)
        for usage in used:
            usage.reset()

    def close(self) -> None:
        """Write what is left. A second call does nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self.write()
