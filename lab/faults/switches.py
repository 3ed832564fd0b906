"""A few bytes of memory in which the fault machine tells one process of the mesh what to do wrong.

The machine writes the file, the process maps it and reads it whenever it needs to know: nothing is sent, so that a
process without an event loop that runs can be told too.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# clock offset, stalls, raises, babbles, holds blocks, refuses pulls, hoards; the process writes: tasks, longest pause,
# weights
_FORMAT = struct.Struct("<dqqqqqqqdq")
_REPORTED = struct.Struct("<qd")
_REPORTED_AT = _FORMAT.size - _REPORTED.size - 8
_WEIGHTS_AT = _FORMAT.size - 8


@dataclass(frozen=True, slots=True)
class Orders:
    """Say what a process has to do wrong."""

    clock_offset_s: float = 0.0
    stalls: int = 0  # id of the process whose engine makes no step; one that is started after it works; 0: none
    raises: int = 0  # how often the engine has been told to raise, since the run began
    babbles: bool = False  # answers get tokens after their end
    holds_blocks: bool = False  # all free blocks are taken
    fails_pulls: bool = False  # no KV can be fetched from peers
    hoards: int = 0  # id of the process that takes more and more memory; 0: none


class Switches:
    """The memory of one process, seen from either side."""

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        if is_new:
            path.write_bytes(bytes(_FORMAT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FORMAT.size)

    @classmethod
    def make(cls, path: Path) -> Self:
        return cls(path, is_new=True)

    def read(self) -> Orders:
        offset_s, stalls, raises, babbles, holds, fails, hoards, _, _, _ = _FORMAT.unpack(self._map[: _FORMAT.size])
        return Orders(offset_s, stalls, raises, bool(babbles), bool(holds), bool(fails), hoards)

    def write(self, orders: Orders) -> None:
        self._map[:_REPORTED_AT] = _FORMAT.pack(
            orders.clock_offset_s,
            orders.stalls,
            orders.raises,
            orders.babbles,
            orders.holds_blocks,
            orders.fails_pulls,
            orders.hoards,
            0,
            0.0,
            0,
        )[:_REPORTED_AT]

    @property
    def tasks(self) -> int:
        """The number of asyncio tasks that the process has reported last."""
        return int(_REPORTED.unpack_from(self._map, _REPORTED_AT)[0])

    @property
    def gc_pause_ms(self) -> float:
        """The longest pause of the process for garbage, in CPU time of its thread."""
        return float(_REPORTED.unpack_from(self._map, _REPORTED_AT)[1])

    def report(self, tasks: int, gc_pause_ms: float) -> None:
        _REPORTED.pack_into(self._map, _REPORTED_AT, tasks, gc_pause_ms)

    @property
    def weights(self) -> int:
        """The weights that the engine of the process has read last, as in lab/faults/weights.py."""
        return int(struct.unpack_from("<q", self._map, _WEIGHTS_AT)[0])

    def report_weights(self, weights: int) -> None:
        struct.pack_into("<q", self._map, _WEIGHTS_AT, weights)

    def close(self) -> None:
        self._map.close()
