"""The rows of a step are put in line and grouped."""

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("torch")

from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.messages import SamplingParams
from kvmesh.workers.engines.torch.batch import check_rows, group_by_length, plan_step
from kvmesh.workers.executor import Row


def row(tokens: Sequence[int], start: int, blocks: Sequence[int], sample: bool = True) -> Row:
    return Row("r", tokens, start, blocks, sample, SamplingParams(), prompt=tokens, output=[])


def test_short_rows_stay_in_one_group() -> None:
    assert group_by_length([8, 5, 1, 1]) == [(0, 4)]


def test_a_row_is_padded_to_less_than_twice_its_length() -> None:
    assert group_by_length([100, 51, 50, 26, 25, 13, 7]) == [(0, 2), (2, 4), (4, 6), (6, 7)]


def test_many_long_rows_are_cut_into_groups_of_bounded_memory() -> None:
    assert group_by_length([8000, 8000, 8000]) == [(0, 2), (2, 3)]


def test_a_row_beyond_the_bound_is_a_group() -> None:
    assert group_by_length([40_000, 39_000]) == [(0, 1), (1, 2)]


def test_no_rows_make_no_groups() -> None:
    assert group_by_length([]) == []


def test_spans_come_first_then_single_tokens_longest_first() -> None:
    rows = [row([1], 2, [5]), row([2, 3, 4], 0, [6]), row([7], 9, [7, 8, 9])]
    plan = plan_step(rows, block_size=4)
    assert plan.token_ids.tolist() == [2, 3, 4, 7, 1]
    assert plan.positions.tolist() == [0, 1, 2, 9, 2]
    assert plan.write_blocks.tolist() == [6, 6, 6, 9, 5]
    assert plan.sampled_rows == [1, 2, 0]
    assert plan.last_tokens.tolist() == [2, 3, 4]


def test_a_row_that_only_fills_the_cache_is_not_sampled() -> None:
    plan = plan_step([row([1, 2], 0, [0], sample=False), row([3], 4, [1, 2])], block_size=4)
    assert plan.sampled_rows == [1]
    assert plan.last_tokens.tolist() == [2]


def test_a_shorter_row_is_padded_with_its_last_block() -> None:
    plan = plan_step([row([1], 9, [7, 8, 9, 3]), row([1], 2, [5, 4])], block_size=4)
    (group,) = plan.groups
    assert np.array_equal(group.table, [[7, 8, 9], [5, 5, 5]])
    assert group.lengths.tolist() == [10, 3]


def test_only_blocks_begun_and_left_partly_filled_are_cleared() -> None:
    rows = [
        row([1], 4, [10, 11]),  # begins 11
        row([1], 5, [20, 21]),  # begun before
        row([1] * 4, 0, [30]),  # fills 30
        row([1] * 6, 0, [40, 41]),  # fills 40, begins 41
        row([1] * 2, 3, [50, 51]),  # fills 50, begins 51
        row([1] * 2, 5, [60, 61]),  # begun before
    ]
    assert plan_step(rows, block_size=4).begun_blocks.tolist() == [11, 41, 51]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (row([], 0, [0]), "0 tokens"),
        (row([1], -1, [0]), "from -1 on"),
        (row([1, 2], 3, [0]), "ends at token 5, its 1 blocks hold 4; give the row its blocks"),
        (row([1], 16, [0, 1, 2, 3, 4]), "the context is 16"),
        (row([100], 0, [0]), "outside the 100 of the model"),
        (row([1], 0, [8]), "outside the 8 of the cache"),
        (row([1], 0, [-1]), "outside the 8 of the cache"),
    ],
)
def test_a_row_without_room_is_named_before_anything_is_computed(wrong: Row, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        check_rows([wrong], block_size=4, num_blocks=8, context_tokens=16, vocab_size=100)
