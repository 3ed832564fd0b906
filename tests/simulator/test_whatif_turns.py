"""Conversations are recognised by their blocks and by what the mesh found in its caches."""

from array import array

import pytest
from msgspec.structs import replace

from kvmesh.frontend.whatif.question import PastMesh, WhatIfQuestion
from kvmesh.simulator import SimRequest
from kvmesh.simulator.requests import thread_name
from kvmesh.simulator.whatif.answer import answer
from kvmesh.simulator.whatif.traffic import PastRequest
from kvmesh.simulator.whatif.turns import Evidence, turns_of, with_turns
from tests.simulator.past import BLOCK_SIZE, TOGETHER, lines_of, talk

MESH = PastMesh(model="", block_size=BLOCK_SIZE, blocks=8192, max_num_seqs=32, max_step_tokens=512)


def past(number: int, blocks: list[int], osl: int = 32, cached: int = 0, at_s: float | None = None) -> PastRequest:
    """Return a request whose prompt ends with a full block."""
    arrival_s = 10.0 * number if at_s is None else at_s
    request = SimRequest(arrival_s, 16 * len(blocks), osl, array("Q", blocks).tobytes(), number)
    return PastRequest(
        request=request,
        cached_tokens=cached,
        ttft_s=0.1,
        itl_s=0.01,
        queue_s=0.0,
        prefill_s=0.1,
        pull_s=0.0,
        computed_on="w",
        answered_on="w",
    )


def blocks_of(one: PastRequest) -> list[int]:
    return array("Q", one.request.names).tolist()


def test_conversations_are_reproduced() -> None:
    config = replace(TOGETHER, workers=3, blocks=8192)
    report = answer(lines_of(talk(), config), WhatIfQuestion(), [MESH])
    assert report.measured.hit_share > 0.7
    assert report.simulated.hit_share == pytest.approx(report.measured.hit_share, abs=0.02)
    assert report.is_known and report.error < 0.1


def test_a_next_turn_gets_the_names_of_the_answer() -> None:
    before, after = past(0, [1, 2]), past(1, [1, 2, 8, 9, 10], cached=64)
    assert [turn.evidence for turn in turns_of([before, after], 16)] == [Evidence.CONFIRMED]
    kept, renamed = with_turns([before, after], 16)
    assert blocks_of(kept) == [1, 2]
    assert blocks_of(renamed) == [1, 2, thread_name(0, 2), thread_name(0, 3), 10]


def test_an_answer_that_the_mesh_did_not_find_is_another_text() -> None:
    requests = [past(0, [1, 2]), past(1, [1, 2, 8, 9, 10], cached=32)]
    assert [turn.evidence for turn in turns_of(requests, 16)] == [Evidence.REFUTED]
    assert [blocks_of(one) for one in with_turns(requests, 16)] == [[1, 2], [1, 2, 8, 9, 10]]


def test_where_nothing_was_found_the_others_decide() -> None:
    elsewhere = [past(2, [3, 4]), past(3, [3, 4, 5, 6, 7], cached=0)]
    confirmed = [past(0, [1, 2]), past(1, [1, 2, 8, 9, 10], cached=64)]
    refuted = [past(0, [1, 2]), past(1, [1, 2, 8, 9, 10], cached=32)]
    assert blocks_of(with_turns([*confirmed, *elsewhere], 16)[-1])[2] == thread_name(2, 2)
    assert blocks_of(with_turns([*refuted, *elsewhere], 16)[-1])[2] == 5


@pytest.mark.parametrize(
    "after",
    [
        past(1, [1, 2, 8, 9, 10], cached=64, at_s=0.2),  # the answer had not ended
        past(1, [1, 2, 8], cached=48),  # too short to hold it
        past(1, [1, 7, 8, 9, 10], cached=16),  # another prompt
    ],
)
def test_what_cannot_hold_the_answer_is_no_next_turn(after: PastRequest) -> None:
    assert list(turns_of([past(0, [1, 2]), after], 16)) == []
