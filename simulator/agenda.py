"""The events of a simulation in order of time."""

import heapq
from collections.abc import Callable
from itertools import count

_FOREVER = float("inf")


class Agenda:
    """Holds what is to happen, and the time of the simulation. Events of one instant happen in the order of `at`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()

    @property
    def due_s(self) -> float:
        """Return when the next event is due; infinity without one."""
        return self._events[0][0] if self._events else _FOREVER

    def at(self, when: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action, arguments))

    def later(self, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Call `action` after `delay_s`, at once if that is 0."""
        if delay_s > 0:
            self.at(self.now + delay_s, action, *arguments)
        else:
            action(*arguments)

    def run_due(self) -> None:
        """Let all events happen that are due now, also those that they add."""
        events, now = self._events, self.now
        while events and events[0][0] <= now:
            _, _, action, arguments = heapq.heappop(events)
            action(*arguments)
