"""Logprobs of tokens in OpenAI's two shapes."""

from collections.abc import Sequence
from math import isnan

from frontend.answer import PlacedLogprob
from frontend.openai.shapes import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from frontend.tokenizer import Tokenizer
from protocol.messages import TokenLogprob

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
    return CompletionLogprobs(
        tokens=[_text(tokenizer, entry.token_id) for entry, *_ in placed],
        token_logprobs=[None if isnan(entry.logprob) else max(entry.logprob, LEAST_LOGPROB) for entry, *_ in placed],
        top_logprobs=[None if isnan(entry.logprob) else _top(tokenizer, entry) for entry, *_ in placed],
        text_offset=[each.offset_chars for each in placed],
    )


def _top(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, float]:
    """Return the likeliest tokens and the chosen one, by their texts; of those with one text, the others by their ids.

    Different parts of characters show as the same text.
    """
    named: dict[str, int] = {}
    found: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        text = _text(tokenizer, token_id)
        if named.setdefault(text, token_id) != token_id:
            text = f"token_id:{token_id}"
        found[text] = max(logprob, LEAST_LOGPROB)
    return found


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    """Return (text, logprob, bytes). Part of a character shows as U+FFFD in the text and exactly in the bytes."""
    data = tokenizer.token_bytes(token_id)
    return data.decode(errors="replace"), max(logprob, LEAST_LOGPROB), list(data)
