"""Steps of decoding in buckets: padded to few sizes, so that a GPU records a step once and replays it (a CUDA graph).

A padded row repeats the last row of the step: it writes the same numbers to the same place, and its result is not read.
A shorter row's table repeats its last block, masked. A CPU records nothing and computes the padded step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvmesh.workers.engines.torch.batch import (
    MAX_GROUP_BLOCKS,
    DecodeGroup,
    Ints,
    StepBatch,
    StepPlan,
    minus_infinity_where,
)
from kvmesh.workers.engines.torch.cache import PagedKv
from kvmesh.workers.engines.torch.model import Transformer

_LEAST_BLOCKS = 8  # of a row: shorter ones are padded to this
_MAX_RECORDED = 64  # graphs; the one recorded first goes first

PaddedStep = Callable[[Tensor], Tensor]  # int64 [rows, 3 + blocks] as `padded` makes them -> [rows, hidden]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The size of a padded step: rows of one new token each, and blocks of each row."""

    rows: int
    blocks: int


def bucket_of(plan: StepPlan, sizes: Sequence[int]) -> Bucket | None:
    """Return the smallest bucket that holds the step. `sizes`: numbers of rows, rising.

    None: the step has prompts, more rows than the largest size, or rows so long that padding them would read too much.
    """
    rows = next((size for size in sizes if size >= len(plan.token_ids)), None)
    if plan.spans or plan.scored_rows or rows is None:
        return None
    longest = max(group.table.shape[1] for group in plan.groups)
    blocks = max(_LEAST_BLOCKS, 1 << (longest - 1).bit_length())
    return Bucket(rows, blocks) if rows * blocks <= MAX_GROUP_BLOCKS else None


def padded(plan: StepPlan, bucket: Bucket) -> Ints:
    """Return each row's token id, position, block to write to and blocks to read: [rows, 3 + blocks]."""
    tables = [
        np.pad(group.table, ((0, 0), (0, bucket.blocks - group.table.shape[1])), mode="edge") for group in plan.groups
    ]
    rows = np.column_stack((plan.token_ids, plan.positions, plan.write_blocks, np.concatenate(tables)))
    return np.pad(rows, ((0, bucket.rows - len(rows)), (0, 0)), mode="edge")


def batch_of(rows: Tensor, kv: PagedKv, dtype: torch.dtype) -> StepBatch:
    """Return the step of `padded` rows that lie on the device. Every tensor is made there, from `rows` alone."""
    token_ids, positions, write_blocks = rows[:, :3].unbind(1)
    table = rows[:, 3:]
    num_keys = table.shape[1] * kv.layout.block_size
    key = torch.arange(num_keys, device=rows.device)
    mask = minus_infinity_where(key > positions[:, None], dtype)[:, None, None, :]
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        write_blocks=write_blocks,
        write_offsets=positions % kv.layout.block_size,
        begun_blocks=None,
        told_tokens=None,
        spans=[],
        groups=[DecodeGroup(0, len(rows), kv.gather_index(table), num_keys, mask)],
    )


class DecodeBuckets:
    """Computes steps of decoding in buckets."""

    def __init__(self, model: Transformer, kv: PagedKv, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        """Use buckets of `sizes` rows, rising. On a GPU each bucket is recorded when it is first needed."""
        self._model = model
        self._kv = kv
        self._dtype = dtype
        self._sizes = sizes
        self._device = kv.blocks.device
        self._recorded: dict[Bucket, PaddedStep] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def forward(self, plan: StepPlan) -> Tensor | None:
        """Compute the step as Transformer.forward does: [S, hidden]. None if it fits no bucket."""
        bucket = bucket_of(plan, self._sizes)
        if bucket is None:
            return None
        if len(plan.begun_blocks):
            self._kv.clear(torch.from_numpy(plan.begun_blocks).to(self._device))
        rows = torch.from_numpy(padded(plan, bucket))
        hidden = self._step(bucket, rows)(rows)
        return hidden[torch.from_numpy(plan.last_tokens).to(self._device)]

    def _step(self, bucket: Bucket, rows: Tensor) -> PaddedStep:
        if self._pool is None:
            return self._compute
        if bucket not in self._recorded:
            if len(self._recorded) == _MAX_RECORDED:
                del self._recorded[next(iter(self._recorded))]
            self._recorded[bucket] = self._record(rows.to(self._device))
        return self._recorded[bucket]

    def _compute(self, rows: Tensor) -> Tensor:
        return self._model.forward(batch_of(rows, self._kv, self._dtype), self._kv)

    def _record(self, rows: Tensor) -> PaddedStep:
        """Record the step of `rows` as a CUDA graph. `rows` stays where the graph reads its input.

        The step is computed once before, as CUDA asks for; it only writes again what the replay writes.
        """
        current, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._compute(rows)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads copy KV blocks meanwhile, which may ask CUDA for what this thread must not.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = self._compute(rows)

        def replay(wanted: Tensor) -> Tensor:
            """Replay the graph with other rows. What it returns is overwritten by the next replay."""
            rows.copy_(wanted)
            graph.replay()
            return hidden

        return replay
