"""Recognise the answers of earlier turns in later prompts, so that the simulation finds them in its caches too. Pure.

No line of a log has the hashes of an answer's blocks. A later prompt that begins with all full blocks of an earlier
one, came after its answer, and is long enough to hold it, is taken for its next turn: what follows is the answer.
What the mesh found in its caches says whether that is so, since clients and templates may change an answer.
"""

from array import array
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from msgspec.structs import replace

from kvmesh.simulator.requests import thread_name
from kvmesh.simulator.whatif.traffic import PastRequest


class Evidence(Enum):
    CONFIRMED = "the mesh found blocks of the answer in its cache"
    REFUTED = "the mesh found all blocks of the earlier prompt, and none behind"
    NONE = "the mesh did not find the earlier prompt: it was evicted, or is elsewhere"


class NextTurn(NamedTuple):
    """A prompt that seems to go on where an earlier request has ended."""

    earlier: int
    later: int
    first: int  # block that is the answer's
    end: int  # ... the last of them, and one
    evidence: Evidence


def with_turns(requests: Sequence[PastRequest], block_size: int) -> list[PastRequest]:
    """Return the requests with the blocks of known answers named as the simulation names them."""
    turns = list(turns_of(requests, block_size))
    count = {kind: sum(turn.evidence is kind for turn in turns) for kind in Evidence}
    believes_unseen = count[Evidence.CONFIRMED] > count[Evidence.REFUTED]
    renamed: dict[int, int] = {}
    for turn in turns:
        if turn.evidence is Evidence.CONFIRMED or (turn.evidence is Evidence.NONE and believes_unseen):
            names = array("Q", requests[turn.later].request.names)
            for number in range(turn.first, min(turn.end, len(names))):
                renamed.setdefault(names[number], thread_name(requests[turn.earlier].request.thread, number))
    return [with_names(one, renamed) for one in requests] if renamed else list(requests)


def turns_of(requests: Sequence[PastRequest], block_size: int) -> Iterator[NextTurn]:
    """Yield for each request the latest turn before it, if there seems to be one."""
    by_last: dict[int, int] = {}  # the last request whose prompt ends with this block
    for later, one in enumerate(requests):
        names = array("Q", one.request.names)
        for number in range(len(names) - 1, -1, -1):
            earlier = by_last.get(names[number])
            if (
                earlier is not None
                and (turn := next_turn(requests, earlier, later, number + 1, block_size)) is not None
            ):
                yield turn
                break
        if names:
            by_last[names[-1]] = later


def next_turn(
    requests: Sequence[PastRequest], earlier: int, later: int, blocks: int, block_size: int
) -> NextTurn | None:
    """Return `later` as the next turn of `earlier`, whose prompt has so many full blocks; None if it cannot be."""
    before, after = requests[earlier], requests[later]
    tokens = before.request.isl_tokens + before.request.osl_tokens
    has_ended = before.first_s + before.decoded_s <= after.arrival_s
    if not has_ended or tokens > after.request.isl_tokens or tokens // block_size <= blocks:
        return None
    found = after.cached_tokens // block_size
    evidence = Evidence.NONE if found < blocks else Evidence.REFUTED if found == blocks else Evidence.CONFIRMED
    return NextTurn(earlier, later, blocks, tokens // block_size, evidence)


def with_names(one: PastRequest, renamed: dict[int, int]) -> PastRequest:
    names = array("Q", [renamed.get(name, name) for name in array("Q", one.request.names)])
    return replace(one, request=replace(one.request, names=names.tobytes()))
