"""Turn the rows of a step into one forward pass: `plan_step` decides, `to_device` makes the tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvmesh.protocol.errors import EngineError
from kvmesh.workers.engines.torch.cache import PagedKv
from kvmesh.workers.executor import Row

_ALWAYS_TOGETHER_BLOCKS = 8  # rows this short cost less together, padded, than a group of their own
MAX_GROUP_BLOCKS = 16_384  # bounds the copy of keys and values that a group's attention reads

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """New tokens of one row: those of the batch in [first, last), at positions start, start + 1, ..."""

    first: int
    last: int
    start: int
    table: Ints  # [1, N] block ids


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """Rows of one new token each: those of the batch in [first, last)."""

    first: int
    last: int
    lengths: Ints  # [B], keys of each row, the new one included
    table: Ints  # [B, N] block ids; a shorter row repeats its last block


@dataclass(frozen=True, slots=True)
class StepPlan:
    """T tokens: the spans of rows with several new tokens, then rows with one, longest first."""

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    write_blocks: Ints  # [T], block id that gets the token's key and value
    begun_blocks: Ints  # [N], block ids that this step begins and leaves partly filled
    spans: list[PlannedSpan]
    groups: list[PlannedGroup]
    last_tokens: Ints  # [S], indices into the T tokens: the last of each row that samples
    sampled_rows: list[int]  # S indices into the rows of the step
    scored_tokens: Ints  # [P], indices into the T tokens: those before the prompt tokens whose logprobs are wanted
    scored_rows: list[int]  # the rows of these, in the same order


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """PlannedSpan, on the device."""

    first: int
    last: int
    gather: Tensor | None  # for PagedKv.gather; None where start is 0: the new keys are all there are
    mask: Tensor | None  # [last - first, start + last - first], added to the scores


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """PlannedGroup, on the device."""

    first: int
    last: int
    gather: Tensor  # for PagedKv.gather
    num_keys: int  # how many of the gathered keys to look at
    mask: Tensor | None  # [B, 1, 1, num_keys], added to the scores; None where all rows have `num_keys`


@dataclass(frozen=True, slots=True)
class PagedRows:
    """All rows of a step for the kernels that read keys and values where they lie."""

    sequences: Tensor  # int64 [S, 4]: first of its tokens in the batch, how many, position of the first, its table
    tables: Tensor  # int64 [...]: block ids of all rows; a row's begin at the place that `sequences` names


@dataclass(frozen=True, slots=True)
class ToldRows:
    """The told tokens of a step with prompts, each a row of one token, for the last layer's kernels."""

    positions: Tensor  # [S]
    write_blocks: Tensor  # [S]
    rows: PagedRows | None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """StepPlan, on the device. Indices are int64, as torch wants them. Rows in `paged` are in no span or group."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    write_blocks: Tensor  # [T]
    write_offsets: Tensor  # [T], position in the block
    begun_blocks: Tensor | None  # [N], to clear first; None where there are none
    told_tokens: Tensor | None  # [S + P], the plan's last_tokens and then its scored_tokens; None: all T, in order
    spans: list[PrefillSpan]
    groups: list[DecodeGroup]
    paged: PagedRows | None = None
    told: ToldRows | None = None  # None: no kernels, or tokens of a prompt are scored, or all are told

    @property
    def gathers(self) -> bool:
        """Return whether the step copies keys and values of the cache."""
        return bool(self.groups) or any(span.gather is not None for span in self.spans)


def group_by_length(num_blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Cut rows, sorted by falling length, into runs [first, last) that are padded to their first row.

    A row longer than `_ALWAYS_TOGETHER_BLOCKS` is padded to less than twice its length, so there are about
    log2(longest) runs. There are more only where a run would exceed `MAX_GROUP_BLOCKS` padded blocks.
    """
    groups: list[tuple[int, int]] = []
    first = 0
    for row, length in enumerate(num_blocks):
        longest = num_blocks[first]
        too_short = longest > max(_ALWAYS_TOGETHER_BLOCKS, 2 * length - 1)
        too_many = row > first and (row + 1 - first) * longest > MAX_GROUP_BLOCKS
        if too_short or too_many:
            groups.append((first, row))
            first = row
    if num_blocks:
        groups.append((first, len(num_blocks)))
    return groups


def check_rows(rows: Sequence[Row], *, block_size: int, num_blocks: int, context_tokens: int, vocab_size: int) -> None:
    """Raises EngineError for a row that cannot be computed: scheduler and executor would disagree."""
    for row in rows:
        end = row.start + len(row.token_ids)
        room = len(row.block_table) * block_size
        if not row.token_ids or row.start < 0:
            raise EngineError(f"row {row.request_id} has {len(row.token_ids)} tokens from {row.start} on")
        if end > room:
            raise EngineError(
                f"row {row.request_id} ends at token {end}, its {len(row.block_table)} blocks hold {room}",
                hint="give the row its blocks before the step",
            )
        if end > context_tokens:
            raise EngineError(f"row {row.request_id} ends at token {end}, the context is {context_tokens}")
        if min(row.token_ids) < 0 or max(row.token_ids) >= vocab_size:
            raise EngineError(f"row {row.request_id} has a token id outside the {vocab_size} of the model")
        if min(row.block_table) < 0 or max(row.block_table) >= num_blocks:
            raise EngineError(f"row {row.request_id} has a block id outside the {num_blocks} of the cache")


def plan_step(rows: Sequence[Row], block_size: int) -> StepPlan:
    """Put the tokens of all rows in one line. `rows` have passed `check_rows`."""
    long = [i for i, row in enumerate(rows) if len(row.token_ids) > 1]
    single = [i for i, row in enumerate(rows) if len(row.token_ids) == 1]
    single.sort(key=lambda i: -rows[i].start)
    order = long + single
    lasts = np.cumsum([len(rows[i].token_ids) for i in order]) - 1
    spans: list[PlannedSpan] = []
    for i, last in zip(long, lasts.tolist(), strict=False):
        row = rows[i]
        table = _table([row], block_size)
        spans.append(PlannedSpan(last + 1 - len(row.token_ids), last + 1, row.start, table))
    base = spans[-1].last if spans else 0
    groups: list[PlannedGroup] = []
    for first, last in group_by_length([rows[i].start // block_size + 1 for i in single]):
        members = [rows[i] for i in single[first:last]]
        lengths = np.array([row.start + 1 for row in members], np.int64)
        groups.append(PlannedGroup(base + first, base + last, lengths, _table(members, block_size)))
    token_ids, positions, write_blocks = _tokens([rows[i] for i in order], block_size)
    sampled = [place for place, i in enumerate(order) if rows[i].sample]
    scored = [place for place, i in enumerate(order) if rows[i].scored_from is not None]
    return StepPlan(
        token_ids=token_ids,
        positions=positions,
        write_blocks=write_blocks,
        begun_blocks=_begun_blocks(rows, block_size),
        spans=spans,
        groups=groups,
        last_tokens=lasts[sampled],
        sampled_rows=[order[place] for place in sampled],
        scored_tokens=_scored_tokens([(rows[order[place]], int(lasts[place])) for place in scored]),
        scored_rows=[order[place] for place in scored],
    )


def _scored_tokens(rows: Sequence[tuple[Row, int]]) -> Ints:
    """Return the places in the batch whose logits are the logprobs of scored tokens: one before each of these.

    `rows`: each with the place of its last token.
    """
    places: list[int] = []
    for row, last in rows:
        scored, shift = row.scored_tokens, last - (row.start + len(row.token_ids))
        places += range(scored.start + shift, scored.stop + shift)
    return np.array(places, np.int64)


def _tokens(rows: Sequence[Row], block_size: int) -> tuple[Ints, Ints, Ints]:
    """Token ids, positions and the block ids they are written to, each [T]."""
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    for row in rows:
        places = range(row.start, row.start + len(row.token_ids))
        token_ids += row.token_ids
        positions += places
        blocks += [row.block_table[place // block_size] for place in places]
    return np.array(token_ids, np.int64), np.array(positions, np.int64), np.array(blocks, np.int64)


def _begun_blocks(rows: Sequence[Row], block_size: int) -> Ints:
    """Blocks whose tail holds what an earlier sequence left there, and attention will read, masked.

    A mask turns numbers into 0, but not a NaN: one overflowing request must not reach the next ones.
    """
    begun: list[int] = []
    for row in rows:
        end = row.start + len(row.token_ids)
        place, filled = divmod(end, block_size)
        if filled and place * block_size >= row.start:
            begun.append(row.block_table[place])
    return np.array(begun, np.int64)


def _table(rows: Sequence[Row], block_size: int) -> Ints:
    """The blocks that the rows use: [len(rows), most blocks of a row]; shorter rows repeat their last.

    Padding with a block of the row itself keeps whatever other sequences hold out of its sums.
    """
    used = [(row.start + len(row.token_ids) - 1) // block_size + 1 for row in rows]
    width = max(used)
    flat: list[int] = []
    for row, count in zip(rows, used, strict=True):
        flat += row.block_table[:count]
        flat += [row.block_table[count - 1]] * (width - count)
    return np.array(flat, np.int64).reshape(len(rows), width)


def to_device(plan: StepPlan, kv: PagedKv, dtype: torch.dtype, paged_below: int = 0) -> StepBatch:
    """Make the tensors of a step: one copy to the device, then nothing that waits for it.

    `dtype`: of the queries, which masks share. `paged_below`: rows with fewer new tokens are for the kernels that read
    keys and values where they lie; 0: none.
    """
    offsets = plan.positions % kv.layout.block_size
    told = np.concatenate((plan.last_tokens, plan.scored_tokens)) if plan.scored_rows else plan.last_tokens
    is_all = np.array_equal(told, np.arange(len(plan.token_ids)))
    tokens = (
        plan.token_ids,
        plan.positions,
        plan.write_blocks,
        offsets,
        plan.begun_blocks,
        told,
    )
    spans = [span for span in plan.spans if span.last - span.first >= paged_below]
    groups = [] if paged_below else plan.groups
    span_tables = [span.table for span in spans]
    group_arrays = [array for group in groups for array in (group.table, group.lengths)]
    moved = iter(_move([*tokens, *span_tables, *group_arrays], kv.blocks.device))
    token_ids, positions, write_blocks, write_offsets, begun_blocks, told_tokens = (next(moved) for _ in tokens)
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        write_blocks=write_blocks,
        write_offsets=write_offsets,
        begun_blocks=begun_blocks if len(plan.begun_blocks) else None,
        told_tokens=None if is_all else told_tokens,
        spans=[_prefill_span(span, next(moved), kv, dtype) for span in spans],
        groups=[_decode_group(group, next(moved), next(moved), kv, dtype) for group in groups],
        paged=_paged_rows(plan, paged_below) if paged_below else None,
        told=_told_rows(plan) if paged_below and not is_all and not plan.scored_rows else None,
    )


def _told_rows(plan: StepPlan) -> ToldRows:
    """Return the last tokens of the rows that are sampled, in their order."""
    last = plan.last_tokens
    tables = [(span.last - 1, span.table.ravel()) for span in plan.spans]
    tables += [(group.first + row, table) for group in plan.groups for row, table in enumerate(group.table)]
    table_of = dict(tables)
    wanted = [table_of[token] for token in last.tolist()]
    places = np.cumsum([0, *(len(table) for table in wanted)])[:-1]
    sequences = np.column_stack((np.arange(len(last)), np.ones_like(last), plan.positions[last], places))
    rows = PagedRows(torch.from_numpy(sequences), torch.from_numpy(np.concatenate(wanted))) if wanted else None
    return ToldRows(torch.from_numpy(plan.positions[last]), torch.from_numpy(plan.write_blocks[last]), rows)


def _paged_rows(plan: StepPlan, paged_below: int) -> PagedRows | None:
    """Return the rows with fewer new tokens than `paged_below`; None if there are none."""
    sequences: list[tuple[int, int, int, int]] = []
    tables: list[Ints] = []
    place = 0
    for span in plan.spans:
        if span.last - span.first >= paged_below:
            continue
        sequences.append((span.first, span.last - span.first, span.start, place))
        tables.append(span.table.ravel())
        place += span.table.size
    for group in plan.groups:
        width = group.table.shape[1]
        for row, length in enumerate(group.lengths.tolist()):
            sequences.append((group.first + row, 1, length - 1, place + row * width))
        tables.append(group.table.ravel())
        place += group.table.size
    if not sequences:
        return None
    return PagedRows(torch.tensor(sequences, dtype=torch.int64), torch.from_numpy(np.concatenate(tables)))


def _move(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Return the same arrays on the device, moved in one copy."""
    sent = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device)
    parts = sent.split_with_sizes([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _prefill_span(span: PlannedSpan, table: Tensor, kv: PagedKv, dtype: torch.dtype) -> PrefillSpan:
    if span.start == 0:
        return PrefillSpan(span.first, span.last, gather=None, mask=None)
    num_new = span.last - span.first
    key = torch.arange(span.start + num_new, device=table.device)
    mask = minus_infinity_where(key > key[span.start :, None], dtype)
    return PrefillSpan(span.first, span.last, kv.gather_index(table), mask)


def _decode_group(group: PlannedGroup, table: Tensor, lengths: Tensor, kv: PagedKv, dtype: torch.dtype) -> DecodeGroup:
    longest = int(group.lengths.max())
    if int(group.lengths.min()) == longest:
        return DecodeGroup(group.first, group.last, kv.gather_index(table), longest, mask=None)
    # With a mask all gathered keys stay in: GPU kernels want masks of an even width.
    num_keys = group.table.shape[1] * kv.layout.block_size
    key = torch.arange(num_keys, device=table.device)
    mask = minus_infinity_where(key >= lengths[:, None], dtype)[:, None, None, :]
    return DecodeGroup(group.first, group.last, kv.gather_index(table), num_keys, mask)


def minus_infinity_where(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to scores."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
