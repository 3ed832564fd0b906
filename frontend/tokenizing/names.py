"""The tokens of a tokenizer by number, without the tokenizer: some megabytes instead of some hundred."""

from typing import Any

from tokenizers import Tokenizer


class TokenNames:
    """Knows what each token is called in the tokenizer.json."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self._names: list[str | None] = [None] * (max(ids.values(), default=0) + 1)
        for name, token_id in ids.items():
            self._names[token_id] = name
        added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        self.added_ids = {token.content: token_id for token_id, token in added.items()}  # special ones among them
        self.special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self.normalized = frozenset(token.content for token in added.values() if token.normalized)  # looked for so
        self.longest_chars = max(map(len, ids), default=1)

    def __len__(self) -> int:
        """Return one more than the highest token id."""
        return len(self._names)

    def name(self, token_id: int) -> str | None:
        return self._names[token_id] if 0 <= token_id < len(self._names) else None

    def hidden_ids(self, shown: frozenset[str]) -> frozenset[int]:
        """Special tokens, without those named in `shown`."""
        return frozenset(token_id for name, token_id in self.special_ids.items() if name not in shown)
