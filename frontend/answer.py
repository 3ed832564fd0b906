"""Turn deltas of tokens into parts of an answer: detokenize, look for stop strings, parse, place logprobs. Pure."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvmesh.frontend.detokenizer import Detokenizer
from kvmesh.frontend.parsers.chain import merge
from kvmesh.frontend.parsers.events import CallBegun, Content, Event, Parser
from kvmesh.frontend.stops import StopMatcher
from kvmesh.protocol.messages import Delta, FinishReason, TokenLogprob


class PlacedLogprob(NamedTuple):
    entry: TokenLogprob  # its logprob is NaN for the first token of a prompt: nothing foretells it
    offset_chars: int  # where the token's text begins in the answer
    of_prompt: bool = False  # a token of the echoed prompt


class Part(NamedTuple):
    """A part holds what can be shown after one delta. Logprobs come with the text they belong to."""

    events: Sequence[Event] = ()
    logprobs: Sequence[PlacedLogprob] = ()

    @property
    def text(self) -> str:
        """Return the prose of the part."""
        return "".join([event.text for event in self.events if isinstance(event, Content)])


NOTHING = Part()


class GrowingAnswer:
    """Builds one answer, delta by delta.

    The result depends on the tokens only, not on how they are cut into deltas: where stop strings or logprobs
    are asked for, tokens are looked at one by one, and the answer ends with the token that completes a stop
    string. Without them a delta is one call of the detokenizer. A parser sees the text that is shown.
    """

    __slots__ = (
        "_decoded_chars",
        "_detokenizer",
        "_min_tokens",
        "_only_one_call",
        "_parser",
        "_shown_chars",
        "_stops",
        "_tells_stop_token",
        "_waiting",
        "_wants_logprobs",
        "completion_tokens",
        "finish_reason",
        "has_calls",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        logprobs: bool = False,
        parser: Parser | None = None,
        only_one_call: bool = False,
        echoed_chars: int | None = None,
    ) -> None:
        """Make an empty answer; with `only_one_call` it ends where the model begins a second call of a tool.

        `echoed_chars`: length of the prompt that stands before it with logprobs. Then each token that was generated has
        a logprob, a stop token too: who cuts the prompt's tokens from the list has to know how many follow.
        """
        self._detokenizer = detokenizer
        self._parser = parser
        self._only_one_call = only_one_call
        self._stops = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens  # of these, no text is taken for a stop string
        self._wants_logprobs = logprobs
        self._waiting: list[PlacedLogprob] = []  # their text is not shown yet
        self._tells_stop_token = echoed_chars is not None
        self._decoded_chars = self._shown_chars = echoed_chars or 0
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.has_calls = False

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it."""
        return None if self._stops is None else self._stops.hit

    @property
    def is_plain(self) -> bool:
        """All further text is shown as it is: until it ends, tokens with `plain_texts` need no `on_delta`."""
        if self._only_one_call or self._stops or self._wants_logprobs:
            return False
        return self._parser is None or self._parser.is_plain

    def plain_texts(self) -> dict[int, bytes] | None:
        """See Detokenizer. The caller adds the tokens that were shown so to `completion_tokens`."""
        return self._detokenizer.plain_texts()

    def on_delta(self, delta: Delta) -> Part:
        """Take the next delta. Once `finish_reason` is set, none may follow."""
        if self._only_one_call and len(delta.token_ids) > 1:
            return self._take_singly(delta)
        if self._stops is None and not self._wants_logprobs:
            return self._take_all(delta)
        return self._take_each(delta)

    def _take_singly(self, delta: Delta) -> Part:
        """Up to the token with which a second call begins: none after it counts."""
        events: list[Event] = []
        logprobs: list[PlacedLogprob] = []
        for single in _singles(delta):
            part = self.on_delta(single)
            events += part.events
            logprobs += part.logprobs
            if self.finish_reason is not None:
                break
        return Part(merge(events), logprobs)

    def _take_all(self, delta: Delta) -> Part:
        self.completion_tokens += len(delta.token_ids)
        text = self._detokenizer.push(delta.token_ids if delta.stop_token is None else _shown_tokens(delta))
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            text += self._detokenizer.flush()
        if self._parser is None:
            return Part((Content(text),)) if text else NOTHING
        return Part(self._parse(text))

    def _parse(self, text: str) -> Sequence[Event]:
        if self._parser is None:
            return (Content(text),) if text else ()
        events = self._parser.push(text) if text else ()
        if self.finish_reason is not None:
            events = [*events, *self._parser.flush()]
        if self._only_one_call:
            events = self._up_to_second_call(events)
        if not self.has_calls:
            self.has_calls = any(isinstance(event, CallBegun) for event in events)
        return events

    def _up_to_second_call(self, events: Sequence[Event]) -> Sequence[Event]:
        for place, event in enumerate(events):
            if isinstance(event, CallBegun) and event.index > 0:
                self.finish_reason = FinishReason.STOP
                return events[:place]
        return events

    def _take_each(self, delta: Delta) -> Part:
        texts: list[str] = []
        shown = _shown_tokens(delta)
        for n, token_id in enumerate(shown):
            self.completion_tokens += 1
            if delta.logprobs is not None and n < len(delta.logprobs):
                self._waiting.append(PlacedLogprob(delta.logprobs[n], self._decoded_chars))
            texts.append(self._match(self._detokenizer.push((token_id,))))
            if self._stopped():
                return self._part(texts)
        self.completion_tokens += len(delta.token_ids) - len(shown)
        if self._tells_stop_token and delta.logprobs is not None and len(shown) < len(delta.logprobs):
            self._waiting.append(PlacedLogprob(delta.logprobs[-1], self._decoded_chars))
        if delta.finish_reason is not None:
            self._finish(delta.finish_reason, texts)
        return self._part(texts)

    def _match(self, text: str) -> str:
        """Return `text` as far as it can be shown."""
        self._decoded_chars += len(text)
        if self._stops is None or self.completion_tokens <= self._min_tokens:
            return text
        return self._stops.push(text)

    def _stopped(self) -> bool:
        if self._stops is None or self._stops.hit is None:
            return False
        self.finish_reason = FinishReason.STOP
        return True

    def _finish(self, reason: FinishReason, texts: list[str]) -> None:
        texts.append(self._match(self._detokenizer.flush()))
        if not self._stopped():
            self.finish_reason = reason
            if self._stops is not None:
                texts.append(self._stops.flush())

    def _part(self, texts: list[str]) -> Part:
        text = "".join(texts)
        self._shown_chars += len(text)
        return Part(self._parse(text), self._ready_logprobs() if self._waiting else ())

    def _ready_logprobs(self) -> list[PlacedLogprob]:
        """Return the logprobs whose text has begun to show; at the end all, but not those of a stop string."""
        waiting = self._waiting
        ends_whole = self.finish_reason is not None and (self._stops is None or self._stops.hit is None)
        ready = len(waiting)
        if not ends_whole:
            ready = sum(1 for placed in waiting if placed.offset_chars < self._shown_chars)
        self._waiting = waiting[ready:]
        return waiting[:ready]


def _singles(delta: Delta) -> Iterator[Delta]:
    """A delta for each of its tokens; what is told of its end goes with the last."""
    *firsts, last = range(len(delta.token_ids))
    for n in firsts:
        yield Delta(delta.token_ids[n : n + 1], logprobs=_logprobs_of(delta, n))
    yield Delta(delta.token_ids[last:], delta.finish_reason, _logprobs_of(delta, last), stop_token=delta.stop_token)


def _logprobs_of(delta: Delta, n: int) -> tuple[TokenLogprob, ...] | None:
    return None if delta.logprobs is None else delta.logprobs[n : n + 1]


def _shown_tokens(delta: Delta) -> Sequence[int]:
    """Return the tokens without the stop token that ended the answer: it counts as a token and is no text."""
    ids = delta.token_ids
    if delta.stop_token is not None and ids and ids[-1] == delta.stop_token:
        return ids[:-1]
    return ids
