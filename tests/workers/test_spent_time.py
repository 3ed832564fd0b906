"""A worker says how it spent its time on a request that is traced, where that is worth a word."""

import time

import pytest

from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import Delta, FinishReason, GenerateRequest, Ticket, TimedDelta, WorkerTimes, pack_tokens
from kvmesh.workers.spent_time import LATE_S, SpentTime

LAST = Delta((7,), FinishReason.STOP)
QUICK = WorkerTimes(queued_s=0.001, first_s=0.002, total_s=9.0)


class Timing:
    """An engine that knows the times of its requests."""

    def __init__(self, times: WorkerTimes) -> None:
        self.asked_for: list[RequestId] = []
        self._times = times

    def times(self, request_id: RequestId) -> WorkerTimes | None:
        self.asked_for.append(request_id)
        return self._times


def traced(flags: str) -> GenerateRequest:
    parent = f"00-{'a' * 32}-{'c' * 16}-{flags}"
    return GenerateRequest(request_id=RequestId("r"), model="m", prompt=pack_tokens([1]), traceparent=parent)


def told(delta: Delta, *, flags: str = "00", times: WorkerTimes | None = None, came_s_ago: float = 0.0) -> Delta:
    timing = None if times is None else Timing(times)
    return SpentTime(traced(flags), time.monotonic() - came_s_ago, timing).told(delta)


def times_of(delta: Delta) -> WorkerTimes | None:
    return delta.times if isinstance(delta, TimedDelta) else None


def test_of_a_sampled_request_the_last_delta_has_the_engines_times() -> None:
    last = told(LAST, flags="01", times=QUICK)
    assert times_of(last) == QUICK
    assert (last.token_ids, last.finish_reason) == (LAST.token_ids, LAST.finish_reason)


def test_deltas_before_the_last_are_passed_as_they_are() -> None:
    delta = Delta((7,))
    assert told(delta, flags="01", times=QUICK) is delta


def test_a_ticket_is_a_last_delta() -> None:
    ticket = Ticket(offer_id=1, worker_id=WorkerId("w"), address="a:1", backend="shm", nonce=1)
    assert times_of(told(Delta((7,), ticket=ticket), flags="01", times=QUICK)) == QUICK


def test_a_quick_request_that_is_not_sampled_tells_nothing() -> None:
    assert told(LAST, times=QUICK) is LAST


@pytest.mark.parametrize("times", [WorkerTimes(first_s=LATE_S + 0.001), WorkerTimes(first_s=0.001, preemptions=1)])
def test_a_late_or_preempted_request_tells_its_times_unsampled(times: WorkerTimes) -> None:
    assert times_of(told(LAST, times=times)) == times


def test_without_an_engine_that_keeps_times_the_workers_clock_counts() -> None:
    found = times_of(told(LAST, flags="01", came_s_ago=2.0))
    assert found is not None
    assert found.first_s == found.total_s >= 2.0
