"""Find the workers that a placement has to score, when most of many workers cannot be chosen. Pure.

Workers that hold nothing of a prompt differ only in what runs there. If one of them is idle, any other of its kind with
more blocks in use, and no fewer requests, costs more for every prompt and is full whenever the first one is. So of a
thousand workers some ten are scored, and the choice is the same as if all were.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from router.index import Holder
from router.load import Share

T = TypeVar("T")


class _Load(NamedTuple):
    """The load of all slots on one shelf. Its order is the order in which shelves are searched."""

    held_blocks: int
    requests: int
    is_busy: bool  # has prompts to compute, which are not the same for all on the shelf


_Entry = tuple[int, Holder]  # when it was chosen last


@dataclass(slots=True)
class _Kind:
    """The slots that are equally fast and equally large."""

    loads: list[_Load] = field(default_factory=list)  # of the shelves, in order
    shelves: dict[_Load, list[_Entry]] = field(default_factory=dict)

    def add(self, load: _Load, entry: _Entry) -> None:
        shelf = self.shelves.get(load)
        if shelf is None:
            shelf = self.shelves[load] = []
            insort(self.loads, load)
        insort(shelf, entry)

    def remove(self, load: _Load, entry: _Entry) -> None:
        shelf = self.shelves[load]
        del shelf[bisect_left(shelf, entry)]
        if not shelf:
            del self.shelves[load]
            del self.loads[bisect_left(self.loads, load)]

    def cheapest(self, apart: Collection[Holder]) -> Iterator[Holder]:
        """Yield the holders that could be the cheapest of those that are not `apart`; at least one, if there is one."""
        fewest = least = float("inf")  # requests of an idle one: with fewer blocks, with as many or fewer
        blocks = -1
        for load in self.loads:
            if load.held_blocks > blocks:
                blocks, fewest = load.held_blocks, least
                if not fewest:
                    return
            if load.requests >= fewest:
                continue
            eligible = (holder for _, holder in self.shelves[load] if holder not in apart)
            if load.is_busy:
                yield from eligible
            elif (longest_ago := next(eligible, None)) is not None:
                yield longest_ago
                least = min(least, load.requests)


class Shelves(Generic[T]):
    """The slots of one role, ordered by their load."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}
        self._places: dict[Holder, tuple[Hashable, _Load, _Entry, T]] = {}

    def __contains__(self, holder: object) -> bool:
        return holder in self._places

    def put(self, holder: Holder, slot: T, kind: Hashable, load: Share, last_chosen: int) -> None:
        """Put a slot on the shelf of its load. `kind` is equal for slots of equal speed and size."""
        where = _Load(load.held_blocks, load.requests, load.queued_tokens > 0)
        entry = (last_chosen, holder)
        known = self._places.get(holder)
        if known is not None and known[:3] == (kind, where, entry) and known[3] is slot:
            return
        self.remove(holder)
        self._places[holder] = (kind, where, entry, slot)
        if (shelves := self._kinds.get(kind)) is None:
            shelves = self._kinds[kind] = _Kind()
        shelves.add(where, entry)

    def remove(self, holder: Holder) -> None:
        """Take a holder off its shelf. An unknown holder is no error."""
        if (known := self._places.pop(holder, None)) is not None:
            kind, load, entry, _ = known
            shelves = self._kinds[kind]
            shelves.remove(load, entry)
            if not shelves.loads:
                del self._kinds[kind]

    def shortlist(self, apart: Collection[Holder]) -> list[T]:
        """Return the slots to score, by holder: those `apart`, and of the others all that could be the cheapest.

        apart: holders that differ by more than their load, for example because they hold a part of the prompt.
        """
        places = self._places
        chosen: Iterable[Holder] = [holder for holder in apart if holder in places]
        holders = [*chosen, *(holder for kind in self._kinds.values() for holder in kind.cheapest(apart))]
        holders.sort()
        return [places[holder][3] for holder in holders]
