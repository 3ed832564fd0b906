"""Text to tokens, with the `tokenizer.json` of a checkpoint."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from frontend.detokenizer import Detokenizer, TokenDecoder, token_decoder
from protocol.errors import ConfigError, InvalidRequestError

LONG_TEXT_CHARS = 8 * 1024  # from here on a thread costs less than the pause of the event loop would
LONG_TEXTS_AT_ONCE = 2


class Tokenizer:
    """Safe to use from several threads: nothing in it changes once it is loaded."""

    def __init__(self, backend: tokenizers.Tokenizer, decoder: TokenDecoder) -> None:
        backend.no_truncation()  # files saved after a training often cut or pad
        backend.no_padding()
        self._backend = backend
        self._decoder = decoder
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), 1)
        self.longest_token_chars: int = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        self._long_texts = asyncio.Semaphore(LONG_TEXTS_AT_ONCE)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read `path`/tokenizer.json. Raises ConfigError."""
        file = Path(path) / "tokenizer.json"
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}", hint="a model needs it") from error
        return cls.from_json(data, origin=str(file))

    @classmethod
    def from_json(cls, data: bytes, origin: str = "tokenizer.json") -> "Tokenizer":
        try:
            backend = tokenizers.Tokenizer.from_str(data.decode())
            spec: dict[str, Any] = msgspec.json.decode(data)
        except Exception as error:  # `tokenizers` raises plain Exception
            raise ConfigError(f"{origin} is no tokenizer: {error}", hint="save the model again") from error
        return cls(backend, token_decoder(backend, spec.get("decoder")))

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokens of `text`. Rendered chats hold their special tokens already, raw prompts do not."""
        if len(text) < LONG_TEXT_CHARS:
            return self._encode(text, add_special_tokens)
        async with self._long_texts:  # each takes a core, and some hundred bytes per character
            return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:  # `fast`: without offsets into the text, which nobody needs
            encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except Exception as error:  # `tokenizers` raises plain Exception and TypeError
            raise InvalidRequestError(f"the prompt cannot be tokenized: {error}") from error
        ids: list[int] = encodings[0].ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """The whole text at once, special tokens left out."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text

    def detokenizer(self) -> Detokenizer:
        """A new stream of tokens to text."""
        return self._decoder.stream()

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for by itself; may be part of a character. Special tokens have their name."""
        return self._decoder.token_bytes(token_id)
