"""Decide whether a request of a batch is sent again, and when. Pure: answers and times in, waits out."""

import random

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
BUSY_TRIES = 20  # of a request that finds no room or no server
FAILED_TRIES = 4  # of a request that a server has failed at

BUSY = frozenset({429, 503})
FAILED = frozenset({408, 500, 502, 504})
UNREACHABLE = 0  # in place of a status: nobody answered


def wait_before_retry(status: int, tries: int, retry_after_s: float | None, rng: random.Random) -> float | None:
    """Return how long to wait before a request is sent again, in seconds. None: its answer counts.

    The wait doubles with each try, up to 30 s, and is then drawn between its half and itself, so that the senders
    do not come together. It is at least what the server asks for, up to the same limit.
    """
    if status in BUSY or status == UNREACHABLE:
        most = BUSY_TRIES
    elif status in FAILED:
        most = FAILED_TRIES
    else:
        return None
    if tries >= most:
        return None
    longest_s = min(FIRST_WAIT_S * 2.0 ** (tries - 1), LONGEST_WAIT_S)
    return max(min(retry_after_s or 0.0, LONGEST_WAIT_S), rng.uniform(longest_s / 2, longest_s))


class OutageWatch:
    """Notice a mesh that is away: every request that is being sent has failed its latest try, for long.

    A request whose answer is still awaited keeps the batch alive: long answers are no failures.
    """

    def __init__(self, give_up_after_s: float) -> None:
        self.give_up_after_s = give_up_after_s
        self._sending: set[str] = set()  # ids of requests
        self._failing: set[str] = set()
        self._all_failing_since_s: float | None = None

    def on_start(self, request_id: str) -> None:
        self._sending.add(request_id)

    def on_failure(self, request_id: str, now_s: float) -> bool:
        """Return whether the batch has to end."""
        self._failing.add(request_id)
        if len(self._failing) < len(self._sending):
            return False
        if self._all_failing_since_s is None:
            self._all_failing_since_s = now_s
        return now_s - self._all_failing_since_s >= self.give_up_after_s

    def on_answer(self, request_id: str) -> None:
        self._sending.discard(request_id)
        self._failing.clear()
        self._all_failing_since_s = None

    def on_give_up(self, request_id: str) -> None:
        self._sending.discard(request_id)
        self._failing.discard(request_id)
