"""Logprobs of tokens in OpenAI's two shapes."""

from collections.abc import Sequence

from frontend.answer import PlacedLogprob
from frontend.openai.shapes import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from frontend.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no -inf


def chat_logprobs(tokenizer: Tokenizer, placed: Sequence[PlacedLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatLogprob(
                *_token(tokenizer, entry.token_id, entry.logprob),
                top_logprobs=[TopLogprob(*_token(tokenizer, *top)) for top in entry.top],
            )
            for entry, _ in placed
        ]
    )


def completion_logprobs(tokenizer: Tokenizer, placed: Sequence[PlacedLogprob]) -> CompletionLogprobs:
    """The chosen token is always among `top_logprobs`, as in OpenAI's API."""
    chosen = [_token(tokenizer, entry.token_id, entry.logprob) for entry, _ in placed]
    return CompletionLogprobs(
        tokens=[text for text, _, _ in chosen],
        token_logprobs=[logprob for _, logprob, _ in chosen],
        top_logprobs=[
            {text: logprob for text, logprob, _ in (_token(tokenizer, *top) for top in entry.top)} | {text: logprob}
            for (entry, _), (text, logprob, _) in zip(placed, chosen, strict=True)
        ],
        text_offset=[offset for _, offset in placed],
    )


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    """Return (text, logprob, bytes). Part of a character shows as U+FFFD in the text and exactly in the bytes."""
    data = tokenizer.token_bytes(token_id)
    return data.decode(errors="replace"), max(logprob, LEAST_LOGPROB), list(data)
