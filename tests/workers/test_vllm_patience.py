"""A pull of vLLM is given up after the time in which it could have pulled, not after time in a queue."""

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.workers.engines.vllm.patience import PullClock

LOOKS = st.lists(st.tuples(st.floats(0.01, 5), st.integers(0, 3)), min_size=1, max_size=40)  # seconds since, queued


def test_the_limit_is_that_of_the_clock_while_nobody_queues() -> None:
    clock = PullClock(10.0, now_s=100.0)
    assert [clock.has_run_out(now_s, num_queued=0) for now_s in (100.0, 105.0, 109.9, 110.0)] == [False] * 3 + [True]


def test_time_in_which_requests_queue_does_not_count() -> None:
    clock = PullClock(1.0, now_s=0.0)
    assert not any(clock.has_run_out(float(now_s), num_queued=1) for now_s in range(1, 600))
    assert not clock.has_run_out(599.5, num_queued=0)
    assert clock.has_run_out(600.0, num_queued=0)


@given(LOOKS, st.floats(0.1, 20))
def test_time_without_a_queue_counts_against_the_limit(looks: list[tuple[float, int]], limit_s: float) -> None:
    clock, now_s, free_s = PullClock(limit_s, now_s=0.0), 0.0, 0.0
    for since_s, num_queued in looks:
        now_s += since_s
        free_s += 0.0 if num_queued else since_s
        has_run_out = clock.has_run_out(now_s, num_queued)
        if abs(free_s - limit_s) > 1e-6:
            assert has_run_out == (free_s > limit_s)
