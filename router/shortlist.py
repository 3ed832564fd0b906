"""Find the workers that a placement has to score, when most of many workers cannot be chosen. Pure.

Workers that hold nothing of a prompt differ only in what runs there. If one of them is idle, any other of its kind with
more blocks in use, and no fewer requests, costs more for every prompt and is full whenever the first one is. So of a
thousand workers some ten are scored, and the choice is the same as if all were.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from kvmesh.router.index import Holder
from kvmesh.router.load import Share

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


class _Place(NamedTuple):
    kind: Hashable
    load: _Load
    entry: _Entry
    in_flight: int


class Shelves(Generic[T]):
    """The slots of one role, ordered by their load."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}
        self._places: dict[Holder, tuple[_Place, T]] = {}
        self._in_flight: Counter[int] = Counter()  # how many slots have so many requests in flight

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, holder: object) -> bool:
        return holder in self._places

    def put(self, holder: Holder, slot: T, kind: Hashable, load: Share, last_chosen: int, in_flight: int = 0) -> None:
        """Put a slot on the shelf of its load. `kind` is equal for slots of equal speed and size."""
        where = _Load(load.held_blocks, load.requests, load.queued_tokens > 0)
        place = _Place(kind, where, (last_chosen, holder), in_flight)
        known = self._places.get(holder)
        if known is not None and known[0] == place and known[1] is slot:
            return
        self.remove(holder)
        self._places[holder] = (place, slot)
        self._in_flight[in_flight] += 1
        if (shelves := self._kinds.get(kind)) is None:
            shelves = self._kinds[kind] = _Kind()
        shelves.add(where, place.entry)

    def remove(self, holder: Holder) -> None:
        """Take a holder off its shelf. An unknown holder is no error."""
        if (known := self._places.pop(holder, None)) is not None:
            place, _ = known
            shelves = self._kinds[place.kind]
            shelves.remove(place.load, place.entry)
            if not shelves.loads:
                del self._kinds[place.kind]
            self._in_flight[place.in_flight] -= 1
            if not self._in_flight[place.in_flight]:
                del self._in_flight[place.in_flight]

    def shortlist(
        self, apart: Collection[Holder], without: Collection[Holder] = (), held_back: Collection[Holder] = ()
    ) -> list[T]:
        """Return the slots to score, by holder: those `apart`, and of the others all that could be the cheapest.

        apart: holders that differ by more than their load, for example because they hold a part of the prompt.
        without: holders that cannot be chosen. held_back: holders that can only be chosen where all others are too.
        """
        places = self._places
        holders = [holder for holder in apart if holder in places and holder not in without]
        skipped = {*apart, *without} if without else apart
        first = {*skipped, *held_back} if held_back else skipped
        for kind in self._kinds.values():
            found = list(kind.cheapest(first))
            holders += found if found or not held_back else kind.cheapest(skipped)
        holders.sort()
        return [places[holder][1] for holder in holders]

    def in_flight_of(self, holders: Iterable[Holder]) -> list[tuple[Holder, int]]:
        """Return those of the holders that are here, with the number of requests in flight there."""
        places = self._places
        return [(holder, places[holder][0].in_flight) for holder in holders if holder in places]

    def most_in_flight(self, without: Iterable[Holder]) -> int:
        """Return the most requests in flight at one slot that is not among `without`; -1: there is no other slot."""
        places = self._places
        left_out = [places[holder][0].in_flight for holder in without if holder in places]
        most = max(self._in_flight, default=-1)
        if most not in left_out:
            return most
        others = self._in_flight - Counter(left_out)
        return max(others, default=-1)
