"""Count what a batch has done: requests by outcome and tokens. Pure."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.commands.batch.lines import ResultLine


class BatchSummary(Struct, frozen=True, kw_only=True):
    """Report a batch: what `--json` prints. Tokens are those of this run; `kept` results come from earlier runs."""

    output: str
    requests: int
    kept: int
    succeeded: int
    failed: int
    failures: dict[str, int]  # by status; "unreachable": nobody has answered
    retries: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    duration_s: float


@dataclass(slots=True)
class BatchTally:
    requests: int
    kept: int = 0
    succeeded: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, result: ResultLine) -> None:
        if result.is_success and result.response is not None:
            self.succeeded += 1
            self._add_usage(result.response.body)
        else:
            self.failures["unreachable" if result.response is None else str(result.response.status_code)] += 1

    def _add_usage(self, body: msgspec.Raw) -> None:
        usage = usage_in(body)
        prompt, completion = count_in(usage, "prompt_tokens"), count_in(usage, "completion_tokens")
        cached = count_in(usage, "cache_read_input_tokens")
        for name in ("prompt_tokens_details", "input_tokens_details"):
            cached += count_in(usage.get(name), "cached_tokens")
        # Anthropic counts cached tokens beside the others, OpenAI's APIs count them among these.
        beside = count_in(usage, "cache_read_input_tokens")
        self.prompt_tokens += prompt + count_in(usage, "input_tokens") + beside
        self.completion_tokens += completion + count_in(usage, "output_tokens")
        self.cached_tokens += cached

    @property
    def done(self) -> int:
        return self.kept + self.succeeded + self.failed

    @property
    def failed(self) -> int:
        return self.failures.total()

    def summary(self, output: str, duration_s: float) -> BatchSummary:
        return BatchSummary(
            output=output,
            requests=self.requests,
            kept=self.kept,
            succeeded=self.succeeded,
            failed=self.failed,
            failures=dict(sorted(self.failures.items())),
            retries=self.retries,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            duration_s=round(duration_s, 3),
        )


class _Answer(Struct, frozen=True):
    usage: dict[str, Any] | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


def usage_in(body: msgspec.Raw) -> dict[str, Any]:
    """Return the usage of an answer of any endpoint; {} if there is none."""
    try:
        return _decode_answer(body).usage or {}
    except msgspec.DecodeError:
        return {}


def count_in(fields: Any, name: str) -> int:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, int) else 0
