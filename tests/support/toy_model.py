"""A model and its paged cache, small enough for the fakes of engines that this project does not contain."""

from collections.abc import Sequence
from dataclasses import dataclass

VOCAB = 2048
_PRIME = 1_000_003


def next_token(sequence: Sequence[int], lora: str | None = None) -> int:
    """Return the token after the whole sequence so far: the same wherever that was computed."""
    state = 17 + (sum(lora.encode()) if lora else 0)
    for token in sequence:
        state = (state * _PRIME + token + 1) % (1 << 61)
    return 10 + state % (VOCAB - 10)


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    parent: int | None
    hashes: list[int]
    tokens: list[list[int]]
    lora: str | None
    salt: str | None


@dataclass(frozen=True, slots=True)
class RemovedBlock:
    block_hash: int


Event = StoredBlocks | RemovedBlock


class PagedCache:
    """Full blocks of finished sequences; the one that was used least lately, and has no child, goes first.

    Hashes are signed 64-bit numbers, as SGLang's are.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._parents: dict[int, int | None] = {}  # in order of use
        self.news: list[Event] = []

    def __len__(self) -> int:
        return len(self._parents)

    def cached_tokens(self, tokens: Sequence[int], lora: str | None, salt: str | None) -> int:
        """Return the length of the cached prefix; at least one token of a prompt is computed."""
        found = 0
        for block_hash in self._chain(tokens[: len(tokens) - 1], lora, salt):
            if block_hash not in self._parents:
                break
            found += self._block_size
        return found

    def store(self, tokens: Sequence[int], lora: str | None, salt: str | None) -> None:
        parent: int | None = None
        stored: StoredBlocks | None = None
        chain = self._chain(tokens, lora, salt)
        for number, block_hash in enumerate(chain):
            if block_hash in self._parents:
                self._parents[block_hash] = self._parents.pop(block_hash)  # it was used just now
            else:
                if len(self._parents) >= self._num_blocks and not self._evict(keep=set(chain[:number])):
                    break
                self._parents[block_hash] = parent
                if stored is None:
                    stored = StoredBlocks(parent, [], [], lora, salt)
                stored.hashes.append(block_hash)
                stored.tokens.append(list(tokens[number * self._block_size : (number + 1) * self._block_size]))
            parent = block_hash
        if stored is not None:
            self.news.append(stored)

    def take_news(self) -> list[Event]:
        news, self.news = self.news, []
        return news

    def _evict(self, keep: set[int]) -> bool:
        parents = set(self._parents.values())
        for block_hash in self._parents:
            if block_hash not in parents and block_hash not in keep:
                del self._parents[block_hash]
                self.news.append(RemovedBlock(block_hash))
                return True
        return False

    def _chain(self, tokens: Sequence[int], lora: str | None, salt: str | None) -> list[int]:
        chain: list[int] = []
        above = sum((lora or "").encode()) * 31 + sum((salt or "").encode()) * 7919
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            above = hash((above, *tokens[end - self._block_size : end]))
            chain.append(above)
        return chain
