"""Invents tokens instead of computing them, at the pace of a real engine or faster.

The token after n tokens of an answer is a pure function of the prompt and n, so a test can tell which answer a
request must get. The KV cache really holds, for each position, the token that was computed there; a row that
builds on KV which is not its own (a wrong block, a lost pull) is caught.
"""

import time
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from kvcache.memory import KvRegion
from protocol.errors import EngineError
from protocol.hashing import token_bytes
from protocol.messages import KvLayout, TokenLogprob
from workers.executor import ModelInfo, Row, Sampled

FIRST_TOKEN = 3  # below are special tokens


def mock_token(prompt: Sequence[int], index: int, vocab_size: int) -> int:
    """Token number `index` of the answer to `prompt`."""
    digest = xxh3_64_intdigest(token_bytes(prompt), index)
    return FIRST_TOKEN + digest % (vocab_size - FIRST_TOKEN)


def prefill_ms(new_tokens: int) -> float:
    """Time to compute `new_tokens` of prompts in one step."""
    return 4.209989e-07 * new_tokens**2 + 1.518344e-02 * new_tokens + 16.50142 if new_tokens else 0.0


def decode_ms(kv_usage: float) -> float:
    """Time of one token for each sequence, with a share `kv_usage` (0..1) of the KV cache in use."""
    return max(1.0, -25.74 * kv_usage**2 + 54.01 * kv_usage + 5.74)


class MockExecutor:
    def __init__(
        self, *, block_size: int, vocab_size: int = 2048, context_tokens: int = 32768, speedup: float = 1.0
    ) -> None:
        self._layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32")
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._speedup = speedup  # 0: no delay at all
        self._kv = np.zeros((0, 2, block_size), np.float32)  # [block, k or v, offset]: the token, as k

    def load(self) -> ModelInfo:
        return ModelInfo(self._layout, self._context_tokens, self._vocab_size, eos_token_ids=(2,))

    def allocate_kv(self, num_blocks: int, memory: memoryview | None) -> KvRegion:
        shape = (num_blocks, 2, self._layout.block_size)
        whole = np.zeros(shape, np.float32) if memory is None else np.frombuffer(memory, np.float32).reshape(shape)
        self._kv = whole
        return KvRegion(whole.ctypes.data, num_blocks, self._layout, "cpu", whole)

    def execute(self, rows: Sequence[Row]) -> list[Sampled | None]:
        self._take_time(rows)
        return [self._compute(row) for row in rows]

    def close(self) -> None:
        pass

    def _take_time(self, rows: Sequence[Row]) -> None:
        if self._speedup > 0:
            new_tokens = sum(len(row.token_ids) for row in rows if len(row.token_ids) > 1)
            usage = sum(len(row.block_table) for row in rows) / max(1, len(self._kv))
            decoding = any(len(row.token_ids) == 1 for row in rows)
            time.sleep((prefill_ms(new_tokens) + (decode_ms(usage) if decoding else 0)) / 1000 / self._speedup)

    def _compute(self, row: Row) -> Sampled | None:
        size = self._layout.block_size
        end = row.start + len(row.token_ids)
        table = np.asarray(row.block_table[: -(-end // size)])
        mine = self._kv[table, 0].reshape(-1)
        before = np.concatenate([np.asarray(row.prompt), np.asarray(row.output)])[: row.start]
        if not np.array_equal(mine[: row.start], before):
            wrong = int(np.argmax(mine[: row.start] != before))
            raise EngineError(
                f"request {row.request_id}: the KV cache holds token {mine[wrong]:.0f} at position {wrong}, "
                f"not {before[wrong]:.0f}"
            )
        at = np.arange(row.start, end)
        self._kv[table[at // size], 0, at % size] = row.token_ids
        if not row.sample:
            return None
        token = mock_token(row.prompt, len(row.output), self._vocab_size)
        wants = row.sampling.top_logprobs
        return Sampled(token, None if wants is None else TokenLogprob(token, 0.0, ((token, 0.0),) * min(1, wants)))
