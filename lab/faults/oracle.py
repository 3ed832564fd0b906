"""Judge answers. The mock engine's tokens are a function of the prompt, so every right answer is known."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvmesh.lab.faults.traffic import OPTION, REAL_MODEL, Ask
from kvmesh.lab.faults.weights import ORIGINAL, WeightsHistory, token_of

VOCAB = 2048  # of the tiny model's tokenizer
BLAMES = (400, 413, 422)  # statuses that say that a request is wrong; all requests are right
NOBODY_CONTINUES = "other_weights"  # an error of an answer whose rest only other weights could give
LATE_S = 1.5  # a request that is not over so long after its deadline hangs


class Verdict(StrEnum):
    RIGHT = "right"
    LEFT = "left"  # by its client, with right tokens until then
    ERROR = "error"  # said loudly, by a status or an event, or by the end of the frontend's process
    HUNG = "hung"
    EMPTY = "empty_200"
    WRONG = "wrong_tokens"
    REFUSED = "refused"  # with a status that says that the request itself is wrong
    TRUNCATED = "truncated"


@dataclass(slots=True)
class Answered:
    """Hold what a client saw of one request. Times are seconds since the run began."""

    ask: Ask
    sent_s: float
    ended_s: float = 0.0
    status: int = 0
    tokens: dict[int, list[str]] = field(default_factory=dict)  # by choice
    finished: dict[int, str] = field(default_factory=dict)  # reasons, by choice
    is_done: bool = False  # its end was said: [DONE], or a whole body
    error: Mapping[str, Any] | None = None
    broken: str = ""  # how the connection ended before that
    has_left: bool = False
    is_hung: bool = False  # the client gave up waiting
    trace: Mapping[str, Any] = field(default_factory=dict)
    first_s: float = 0.0  # 0: no event came
    last_s: float = 0.0
    events: int = 0
    gap_s: float = 0.0  # the longest between two events
    gap_from_s: float = 0.0
    gap_after: int = 0  # events
    frontend: int = 0  # that took the connection
    refused: int = 0  # connections before that, which other frontends did not take

    def note_event(self, now_s: float) -> None:
        """Take the time of an event with tokens."""
        if not self.first_s:
            self.first_s = now_s
        elif now_s - self.last_s > self.gap_s:
            self.gap_s, self.gap_from_s, self.gap_after = now_s - self.last_s, self.last_s, self.events
        self.last_s = now_s
        self.events += 1

    @property
    def wait(self) -> tuple[float, float]:
        """Return from when to when the client waited longest."""
        until_first = (self.sent_s, self.first_s or self.ended_s)
        later = (self.gap_from_s, self.gap_from_s + self.gap_s)
        return max(until_first, later, key=lambda wait: wait[1] - wait[0])


@dataclass(frozen=True, slots=True)
class Judged:
    verdict: Verdict
    why: str = ""


class Oracle:
    """Knows the right tokens of every request."""

    def __init__(self, shown: Callable[[int], str], chats: Mapping[tuple[str, bool], Sequence[int]]) -> None:
        """Take `shown`, which writes a token as the API does, and the tokens of each chat, with and without tools."""
        self._shown = shown
        self._chats = chats
        self.weights = WeightsHistory()
        self.learned: dict[tuple[int, ...], list[str]] = {}  # of prompts that a real model answered undisturbed

    def right(self, ask: Ask, weights: int = ORIGINAL) -> list[str]:
        """Return the tokens that a model with these weights answers."""
        if ask.model == REAL_MODEL:
            return self.learned[ask.prompt][: ask.max_tokens]
        prompt = ask.prompt or self._chats[ask.messages[-1]["content"], ask.tools]
        return [self._shown(token_of(prompt, index, VOCAB, ask.lora, weights)) for index in range(ask.max_tokens)]

    def judge(self, answered: Answered, stopped_s: float = 0.0) -> Judged:
        """Say whether an answer is what it has to be. `stopped_s`: how long its frontend could do nothing."""
        ask = answered.ask
        if answered.is_hung or answered.ended_s - answered.sent_s - stopped_s > ask.deadline_s + LATE_S:
            return Judged(Verdict.HUNG, f"{answered.ended_s - answered.sent_s:.1f} s of {ask.deadline_s} s")
        if wrong := self._wrong_tokens(answered):
            return Judged(Verdict.WRONG, wrong)
        if answered.has_left:
            return Judged(Verdict.LEFT)
        if answered.error is not None or answered.status not in (0, 200):
            return self._judge_error(answered)
        if answered.broken and not answered.status:
            return Judged(Verdict.ERROR, answered.broken)  # no answer began
        if answered.broken or not answered.is_done:
            return Judged(Verdict.TRUNCATED, answered.broken or "it ended without its end")
        if ask.options:
            return _judge_guided(answered)
        whole = [len(answered.tokens.get(choice, ())) == ask.max_tokens for choice in range(ask.choices)]
        if all(whole) and set(answered.finished.values()) == {"length"}:
            return Judged(Verdict.RIGHT)
        if not any(answered.tokens.values()):
            return Judged(Verdict.EMPTY, f"no token, finished: {answered.finished}")
        counts = {choice: len(tokens) for choice, tokens in answered.tokens.items()}
        return Judged(Verdict.TRUNCATED, f"{counts} of {ask.max_tokens} tokens, finished: {answered.finished}")

    def _wrong_tokens(self, answered: Answered) -> str:
        """Return how an answer differs from those of all weights that its worker may have had; "" if it equals one.

        The decode worker counts, whatever KV it has pulled. An answer of two models equals neither's.
        """
        ask = answered.ask
        if ask.options:
            return ""
        trace = answered.trace
        is_one = bool(trace) and not trace.get("migrations") and ask.choices == 1  # choices may be of several workers
        decided = str(trace.get("decode_worker") or "") if is_one else ""
        possible = self.weights.possible(decided, answered.sent_s, answered.ended_s)
        for choice, tokens in answered.tokens.items():
            rights = [self.right(ask, weights)[: len(tokens)] for weights in sorted(possible)]
            if tokens in rights:
                continue
            right = max(rights, key=lambda one: _equal(tokens, one))
            at = _equal(tokens, right)
            return f"choice {choice}, token {at}: {tokens[at : at + 3]} not {right[at : at + 3]}{_of(sorted(possible))}"
        return ""

    def _judge_error(self, answered: Answered) -> Judged:
        error = answered.error or {}
        why = f"{answered.status} {error.get('code')}: {error.get('message')}"
        if answered.status in BLAMES or error.get("type") == "invalid_request_error":
            return Judged(Verdict.REFUSED, why)
        is_begun = any(answered.tokens.values())
        is_hurried = answered.ask.is_hurried and error.get("code") == "deadline_exceeded"
        if is_begun and not is_hurried and error.get("code") != NOBODY_CONTINUES:
            return Judged(Verdict.TRUNCATED, f"after {answered.events} events: {why}")
        return Judged(Verdict.ERROR, why)


def _judge_guided(answered: Answered) -> Judged:
    """Judge a whole answer that a guide has held to an object with one of few strings."""
    text = "".join(answered.tokens.get(0, ()))
    if not text:
        return Judged(Verdict.EMPTY, f"no token, finished: {answered.finished}")
    if set(answered.finished.values()) != {"stop"}:
        return Judged(Verdict.TRUNCATED, f"{text!r}, finished: {answered.finished}")
    try:
        held = json.loads(text)
    except ValueError:
        return Judged(Verdict.WRONG, f"no JSON: {text!r}")
    is_right = isinstance(held, dict) and list(held) == [OPTION] and held[OPTION] in answered.ask.options
    return Judged(Verdict.RIGHT) if is_right else Judged(Verdict.WRONG, f"{text!r} is not what the guide allows")


def _equal(tokens: Sequence[str], right: Sequence[str]) -> int:
    """Return how many tokens are equal at the beginning."""
    pairs = enumerate(zip(tokens, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(tokens), len(right)))


def _of(possible: Sequence[int]) -> str:
    return "" if possible == [ORIGINAL] else f", nor of any weights of {list(possible)}"
