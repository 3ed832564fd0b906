"""Sequences of the simulation: the names of their blocks stand for tokens, which no part has.

For the mesh's prefix hashes a block is two "tokens" here, the halves of its name. The router's index and the block
pool then work as they do live, with any block size.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.protocol.events import KvEvent, Stored
from kvmesh.protocol.hashing import CHAIN_SEED, sequence_hash_bytes, unpack_hashes
from kvmesh.protocol.messages import GenerateRequest
from kvmesh.simulator.requests import thread_name
from kvmesh.workers.scheduler import SequenceState

HALVES = 2  # u32 of a name
NO_STOPS: frozenset[int] = frozenset()
_U32 = 0xFFFF_FFFF


class Length:
    """Stand for a list of tokens of which only the number matters."""

    __slots__ = ("_length",)

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice, /) -> Sequence[int]:
        return range(*part.indices(self._length))

    def append(self, token_id: int, /) -> None:
        self._length += 1

    def extend(self, token_ids: Sequence[int], /) -> None:
        self._length += len(token_ids)


@dataclass(slots=True, eq=False)
class SimulatedSequence(SequenceState):
    names: bytes = b""  # u64, of the prompt's full blocks
    thread: int = 0

    def extend_hashes(self, count: int, block_size: int) -> None:
        known = len(self.hashes)
        if count > known:
            names = array("Q", [self._name(number) for number in range(known, count)]).tobytes()
            parent = self.hashes[-1] if known else None
            self.hashes += unpack_hashes(sequence_hash_bytes(names, HALVES, CHAIN_SEED, parent))  # type: ignore[arg-type]

    def block_tokens(self, number: int, block_size: int) -> Sequence[int]:
        name = self._name(number)
        return (name & _U32, name >> 32)

    def _name(self, number: int) -> int:
        start = 8 * number
        if start < len(self.names):
            return int.from_bytes(self.names[start : start + 8], "little")
        return thread_name(self.thread, number)


def prompt_hashes(names: bytes) -> bytes:
    """Return the sequence hashes of a prompt's full blocks, packed, as the router knows them."""
    return sequence_hash_bytes(names, HALVES)


def sequence_for(
    request: GenerateRequest, isl_tokens: int, hashes: list[int], names: bytes, thread: int
) -> SequenceState:
    """Return the sequence of a request. `hashes` belong to the prompt's full blocks; the sequence keeps the list."""
    num_generated = len(request.generated)
    return SimulatedSequence(
        request=request,
        prompt=range(isl_tokens),
        output=list(request.generated),
        tokens=Length(isl_tokens + num_generated),
        stop_ids=NO_STOPS,
        seed=0,
        hashes=hashes,  # type: ignore[arg-type]
        names=names,
        thread=thread,
    )


def as_told(events: Sequence[KvEvent]) -> list[KvEvent]:
    """Return a cache's events with block sizes in halves of names."""
    return [
        Stored(event.hashes, event.parent, event.token_ids, HALVES, medium=event.medium)
        if isinstance(event, Stored)
        else event
        for event in events
    ]
