"""Check that each row builds on its own KV: the mock's cache holds, as key of a position, the token itself.

KV that a row finds in the cache is compared in whole before the row continues from there: a shared prefix, a pull,
blocks that a preemption left. KV that the row computed itself is compared again in turns, a few blocks in each step. So
a step costs the same however long the row is; a row of few blocks is compared in whole every time.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmesh.protocol.errors import EngineError
from kvmesh.workers.engines.mock.answers import prompt_digest
from kvmesh.workers.executor import Row

BLOCKS_PER_STEP = 2
_TOKEN_BYTES = 4  # float32: exact up to 2**24


@dataclass(slots=True, eq=False)
class Seen:
    """The part of one row that was compared."""

    prompt: Sequence[int]  # this very object: an answer of the same name is another one
    digest: int  # of the prompt
    keys: bytearray  # float32, of all positions computed so far
    turn: int = -1  # the block that was compared last


class Witness:
    def __init__(self, kv: NDArray[np.float32]) -> None:
        """Watch `kv`, the whole cache: [num_blocks, 2 (k, v), block_size]."""
        self._kv = kv
        self._bytes = kv.data.cast("B")
        self._key_bytes = kv.shape[2] * _TOKEN_BYTES  # of one block
        self._block_bytes = 2 * self._key_bytes
        self._block_size = kv.shape[2]
        self._seen: dict[str, Seen] = {}

    def take(self, rows: Sequence[Row]) -> list[Seen]:
        """Compare the KV that `rows` build on, and write theirs. Raises EngineError for KV that is not their own."""
        before, self._seen = self._seen, {}  # those that are not in this step are compared in whole when they are
        return [self._take(row, before.get(row.request_id)) for row in rows]

    def _take(self, row: Row, seen: Seen | None) -> Seen:
        num_full, rest = divmod(row.start, self._block_size)
        if seen is None or seen.prompt is not row.prompt or len(seen.keys) != row.start * _TOKEN_BYTES:
            seen = self._compare_whole(row)
        else:
            for _ in range(min(num_full, BLOCKS_PER_STEP)):
                seen.turn = seen.turn + 1 if seen.turn + 1 < num_full else 0
                self._compare(row, seen.keys, seen.turn)
            if rest:
                self._compare(row, seen.keys, num_full)
        self._write(row, seen)
        self._seen[row.request_id] = seen
        return seen

    def _compare_whole(self, row: Row) -> Seen:
        keys = bytearray(_keys_of(row.prompt[: row.start]))
        keys += _keys_of(row.output[: max(0, row.start - len(row.prompt))])
        if keys:
            table = row.block_table[: -(-row.start // self._block_size)]
            if self._kv[table, 0].tobytes()[: len(keys)] != keys:
                self._complain(row, keys)
        return Seen(row.prompt, prompt_digest(row.prompt, row.lora), keys)

    def _compare(self, row: Row, keys: bytearray, block: int) -> None:
        """Compare one block of the row, as far as it is filled."""
        mine = keys[block * self._key_bytes : (block + 1) * self._key_bytes]
        at = row.block_table[block] * self._block_bytes
        if self._bytes[at : at + len(mine)].tobytes() != mine:
            self._complain(row, keys)

    def _write(self, row: Row, seen: Seen) -> None:
        table, size, start = row.block_table, self._key_bytes, row.start * _TOKEN_BYTES
        seen.keys += _keys_of(row.token_ids)
        while start < len(seen.keys):
            block, offset = divmod(start, size)
            new = seen.keys[start : (block + 1) * size]
            at = table[block] * self._block_bytes + offset
            self._bytes[at : at + len(new)] = new
            start += len(new)

    def _complain(self, row: Row, keys: bytearray) -> None:
        before = np.frombuffer(keys, np.float32)
        table = np.array(row.block_table[: -(-row.start // self._block_size)], np.int64)
        mine = self._kv[table, 0].reshape(-1)[: row.start]
        wrong = int(np.argmax(mine != before))
        raise EngineError(
            f"request {row.request_id}: the KV cache holds token {mine[wrong]:.0f} at position {wrong}, "
            f"not {before[wrong]:.0f}"
        )


def _keys_of(token_ids: Sequence[int]) -> bytes:
    few = len(token_ids) < 16  # of an array of many numpy takes the bytes as they are
    return (array("f", token_ids) if few else np.array(token_ids, np.float32)).tobytes()
