"""Logprobs of tokens in OpenAI's two shapes."""

from collections.abc import Sequence
from math import isnan

from kvmesh.frontend.answer import PlacedLogprob
from kvmesh.frontend.openai.shapes import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from kvmesh.frontend.tokenizer import Tokenizer
from kvmesh.protocol.messages import TokenLogprob

LEAST_LOGPROB = -9999.0  # JSON has no -inf


def chat_logprobs(tokenizer: Tokenizer, placed: Sequence[PlacedLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatLogprob(
                *_token(tokenizer, entry.token_id, entry.logprob),
                top_logprobs=[TopLogprob(*_token(tokenizer, *top)) for top in entry.top],
            )
            for entry, *_ in placed
        ]
    )


def completion_logprobs(tokenizer: Tokenizer, placed: Sequence[PlacedLogprob]) -> CompletionLogprobs:
    """The chosen token is always among `top_logprobs`, as in OpenAI's API. The first token of a prompt has neither."""
    texts = _TokenTexts(tokenizer)
    return CompletionLogprobs(
        tokens=[texts[entry.token_id] for entry, *_ in placed],
        token_logprobs=[None if isnan(entry.logprob) else max(entry.logprob, LEAST_LOGPROB) for entry, *_ in placed],
        top_logprobs=[None if isnan(entry.logprob) else _top(texts, entry) for entry, *_ in placed],
        text_offset=[each.offset_chars for each in placed],
    )


class _TokenTexts(dict[int, str]):
    """Token id -> its text; filled as tokens are met, which in the prompts that are scored is often."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._tokenizer.token_bytes(token_id).decode(errors="replace")
        return text


def _top(texts: _TokenTexts, entry: TokenLogprob) -> dict[str, float]:
    """Return the likeliest tokens and the chosen one, by their texts; of those with one text, the others by their ids.

    Different parts of characters show as the same text.
    """
    of_each = dict(entry.top)
    of_each[entry.token_id] = entry.logprob
    found = {texts[token_id]: max(logprob, LEAST_LOGPROB) for token_id, logprob in of_each.items()}
    return found if len(found) == len(of_each) else _told_apart(texts, of_each)


def _told_apart(texts: _TokenTexts, logprobs: dict[int, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, logprob in logprobs.items():
        text = texts[token_id]
        found[f"token_id:{token_id}" if text in found else text] = max(logprob, LEAST_LOGPROB)
    return found


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    """Return (text, logprob, bytes). Part of a character shows as U+FFFD in the text and exactly in the bytes."""
    data = tokenizer.token_bytes(token_id)
    return data.decode(errors="replace"), max(logprob, LEAST_LOGPROB), list(data)
