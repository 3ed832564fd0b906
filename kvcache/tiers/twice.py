"""Choose the blocks that a slow tier takes: those that a second prompt has asked for. Pure.

What is used once is not worth a write. Names are remembered, so that a block counts as used twice also if it was
computed again in between. All maps are bounded.
"""

from collections import deque
from collections.abc import Sequence

from kvmesh.protocol.ids import SequenceHash

REMEMBERED = 1 << 18  # names of blocks that were asked for once


class UsedTwice:
    """The blocks that one slow tier is to get."""

    def __init__(self, most_ready: int, remembered: int = REMEMBERED) -> None:
        """Keep at most `most_ready` names of blocks that can be copied now."""
        self._most_ready = most_ready
        self._remembered = remembered
        self._asked: dict[SequenceHash, None] = {}  # the latest last
        self._wanted: dict[SequenceHash, None] = {}  # not on the device yet
        self._ready: deque[SequenceHash] = deque()

    def ask(self, names: Sequence[SequenceHash]) -> list[SequenceHash]:
        """Take that a prompt asks for these blocks; return those that were asked for before."""
        again = [name for name in names if name in self._asked]
        for name in names:
            self._asked.pop(name, None)
            self._asked[name] = None
        while len(self._asked) > self._remembered:
            del self._asked[next(iter(self._asked))]
        return again

    def want(self, name: SequenceHash, *, on_device: bool) -> int:
        """Let a block be copied, now or when the device has it. Return how many others are given up for it."""
        if not on_device:
            self._wanted[name] = None
            if len(self._wanted) <= self._most_ready:
                return 0
            del self._wanted[next(iter(self._wanted))]
            return 1
        self._ready.append(name)
        if len(self._ready) <= self._most_ready:
            return 0
        self._ready.popleft()
        return 1

    def committed(self, name: SequenceHash) -> int:
        """Take that the device has a block now. Return how many others are given up for it."""
        if name not in self._wanted:
            return 0
        del self._wanted[name]
        return self.want(name, on_device=True)

    @property
    def has_ready(self) -> bool:
        """Return whether there is a block that can be copied now."""
        return bool(self._ready)

    def next(self) -> SequenceHash | None:
        """Return the block to copy next, None if there is none."""
        return self._ready.popleft() if self._ready else None

    def put_back(self, name: SequenceHash) -> None:
        """Copy a block first the next time: there was too much on its way."""
        self._ready.appendleft(name)

    def clear(self) -> None:
        self._asked.clear()
        self._wanted.clear()
        self._ready.clear()
