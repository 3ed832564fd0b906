"""Count what was used in the last minute. Pure: the time is an argument."""

from collections import deque

WINDOW_S = 60.0
SLOT_S = 0.5  # uses of one slot leave the window together
_SLOTS = round(WINDOW_S / SLOT_S)


def slot_of(now: float) -> int:
    return int(now // SLOT_S)


class SlidingWindow:
    """Lets through at most `limit` in any minute, and counts each use for up to half a second longer than a minute.

    A use is given back to the slot in which it was taken, so the sum of any minute is never more than `limit` unless
    something was charged that was not asked for.
    """

    __slots__ = ("_slots", "limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0  # in the slots that still count, as of the last call
        self._slots: deque[list[int]] = deque()  # [slot, used in it], oldest first

    def take(self, now: float, amount: int) -> bool:
        """Use `amount` if so much is free. Return whether it was."""
        if amount > self.free(now):
            return False
        self.charge(now, amount)
        return True

    def charge(self, now: float, amount: int) -> None:
        """Use `amount`, also if less is free: the work has been done."""
        self._expire(now)
        self._add(slot_of(now), amount)

    def give_back(self, slot: int, amount: int) -> None:
        """Undo a use of `amount` that was taken in `slot`. A slot that counts no longer has nothing to give back."""
        for entry in reversed(self._slots):
            if entry[0] == slot:
                amount = min(amount, entry[1])
                entry[1] -= amount
                self.used -= amount
            if entry[0] <= slot:
                return

    def spread(self, now: float, amount: int) -> None:
        """Count `amount` as if it had been used evenly over the last minute."""
        last = slot_of(now)
        self._slots.clear()
        self.used = 0
        for n in range(_SLOTS):
            if share := amount * (n + 1) // _SLOTS - amount * n // _SLOTS:
                self._add(last - _SLOTS + 1 + n, share)

    def uses(self, now: float) -> list[tuple[int, int]]:
        """Return the slots that count, with what was used in each."""
        self._expire(now)
        return [(slot, used) for slot, used in self._slots if used]

    def count_past(self, now: float, time: float, amount: int) -> None:
        """Count a use that was at `time`."""
        slots = dict(self.uses(now))
        slots[slot_of(time)] = slots.get(slot_of(time), 0) + amount
        self._slots = deque([slot, slots[slot]] for slot in sorted(slots))
        self.used += amount
        self._expire(now)

    def free(self, now: float) -> int:
        """Return how much can be used now."""
        self._expire(now)
        return max(0, self.limit - self.used)

    def wait_s(self, now: float, amount: int) -> float:
        """Return the time until `amount` is free, if nothing else is used or given back. More than `limit` counts as
        `limit`."""
        lacking = min(amount, self.limit) - self.limit + self._expire(now)
        if lacking <= 0:
            return 0.0
        for slot, used in self._slots:
            lacking -= used
            if lacking <= 0:
                return max(0.0, _end_s(slot) - now)
        return WINDOW_S

    def reset_s(self, now: float) -> float:
        """Return the time until nothing counts any more, if nothing else is used."""
        self._expire(now)
        return max(0.0, _end_s(self._slots[-1][0]) - now) if self._slots else 0.0

    def _add(self, slot: int, amount: int) -> None:
        self.used += amount
        if self._slots and self._slots[-1][0] >= slot:  # a clock may be read again in another order
            self._slots[-1][1] += amount
        else:
            self._slots.append([slot, amount])

    def _expire(self, now: float) -> int:
        """Forget the slots that no longer count. Return what is used in the others."""
        slots = self._slots
        while slots and _end_s(slots[0][0]) <= now:
            self.used -= slots.popleft()[1]
        return self.used


def _end_s(slot: int) -> float:
    """Return when the uses of a slot stop to count: a minute after its end."""
    return (slot + 1) * SLOT_S + WINDOW_S
