"""Estimates of what a request will take are made of what requests took, and of nothing else."""

import random

import pytest

from kvmesh.router.estimate import (
    LEAST,
    LONG_TOKENS,
    AnswerLengths,
    ArrivalGaps,
    FadingLine,
    Ratios,
    ServiceTimes,
    WorkLengths,
)


def times_of(count: int, *, first_s: float = 0.1, itl_s: float = 0.02, osl: int = 50, most: int = 100) -> ServiceTimes:
    times = ServiceTimes()
    for _ in range(count):
        times.placed(0.0, 4)
        times.began(100.0, first_s)
        times.ended(4, itl_s)
        times.answered(osl, most, first_s + osl * itl_s)
    return times


def test_without_measurements_there_is_no_estimate() -> None:
    assert ServiceTimes().estimate(100, 100) is None
    assert times_of(LEAST - 1).estimate(100, 100) is None


def test_a_request_without_a_length_has_no_estimate() -> None:
    assert times_of(LEAST).estimate(100, 0) is None


def test_a_worker_of_which_nothing_is_known_has_all_its_time_to_spare() -> None:
    assert ServiceTimes().spare_share(4, 0.1) == 1.0
    assert times_of(LEAST - 1, itl_s=0.5).spare_share(4, 0.1) == 1.0


def test_slower_answers_leave_less_time_to_spare() -> None:
    shares = [times_of(LEAST, itl_s=itl_s).spare_share(4, 0.1) for itl_s in (0.01, 0.05, 0.08, 0.1)]
    assert shares == pytest.approx([0.7, 0.3, 0.0, -0.2])


def test_workers_that_never_kept_the_slo_have_nothing_to_save() -> None:
    """An engine on CPUs may take 0.2 s a token whatever it does: to refuse prompts would only lose requests."""
    times = times_of(2 * LEAST, itl_s=0.2)
    times.ended(4, 0.01, LONG_TOKENS - 1)
    assert times.spare_share(4, 0.1) == 1.0
    times.ended(1, 0.09, LONG_TOKENS)
    assert times.spare_share(4, 0.1) < 0


def test_more_sequences_leave_less_time_to_spare() -> None:
    times = ServiceTimes()
    for running in range(1, 2 * LEAST):
        times.ended(running, 0.01 + 0.002 * running)
    assert times.spare_share(10, 0.1) == pytest.approx(0.5)
    assert times.spare_share(40, 0.1) == pytest.approx(-0.1)


def test_an_estimate_is_made_of_prompt_and_expected_tokens() -> None:
    found = times_of(LEAST).estimate(100, 100)
    assert found is not None
    assert found.first_s == pytest.approx(0.1)
    assert found.total_s == pytest.approx(0.1 + 49 * 0.02)  # answers have half of what is asked for


def test_a_line_finds_the_slope_of_noisy_measurements() -> None:
    rng, line = random.Random(1), FadingLine()
    for _ in range(300):
        x = rng.uniform(1, 64)
        line.add(x, 0.01 + 0.0005 * x + rng.gauss(0, 0.0005))
    assert line.at(16) == pytest.approx(0.018, rel=0.1)
    assert line.at(64) == pytest.approx(0.042, rel=0.1)


def test_a_line_through_one_place_is_flat_and_never_falls() -> None:
    flat, falling = FadingLine(), FadingLine()
    for number in range(20):
        flat.add(8, 0.5)
        falling.add(number, 20.0 - number)
    assert flat.at(100) == pytest.approx(0.5)
    assert falling.at(100) == falling.at(0) > 0


def test_new_measurements_replace_old_ones() -> None:
    line = FadingLine()
    for took_s in [5.0] * 200 + [1.0] * 200:
        line.add(8, took_s)
    assert line.at(8) == pytest.approx(1.0, rel=0.02)


def test_lengths_are_known_apart_by_what_was_asked_for() -> None:
    lengths = AnswerLengths()
    for _ in range(20):
        lengths.add(16, 16)
        lengths.add(100, 4000)
    assert lengths.expected(16) == pytest.approx(16)
    assert lengths.expected(3000) == pytest.approx(75)


def test_the_error_is_a_quantile_of_the_last_answers() -> None:
    ratios = Ratios()
    assert ratios.quantile(0.95) == 1.0
    for number in range(100):
        ratios.add(1.0 + number / 100)
    assert ratios.quantile(0.95) == pytest.approx(1.95)
    assert ratios.quantile(0.05) == pytest.approx(1.05)


def test_the_error_of_short_answers_is_not_that_of_long_ones() -> None:
    times = ServiceTimes()
    for number in range(40):
        times.compared(16, 1.0)
        times.compared(400, 1.0 + number % 4)
    assert times.error(0.95, 16) == 1.0
    assert times.error(0.95, 400) == 4.0
    assert times.error(0.95, 5000) > 1.0, "of an unknown length the errors of all count"


def test_the_work_is_in_the_long_answers() -> None:
    work = WorkLengths()
    assert work.quantile(0.5) == 0.0, "nothing is known"
    for _ in range(9):
        work.add(10)
    work.add(910)
    assert work.quantile(0.05) == 10
    assert work.quantile(0.5) == 910, "one answer in ten has nine tenths of the tokens"


def test_the_time_of_most_work_is_that_of_long_answers_on_full_workers() -> None:
    times = times_of(20, first_s=0.1, itl_s=0.02, osl=50)
    assert times.needed_for(0.9, 4) == pytest.approx(0.1 + 50 * 0.02)
    assert ServiceTimes().needed_for(0.9, 4) == 0


def test_the_gap_of_a_queue_is_the_mean_of_what_was_measured() -> None:
    times = ServiceTimes()
    for _ in range(4):
        times.drained(0.0)
    assert times.gap_s == 0, "too little is known"
    for _ in range(10):
        times.drained(0.0)
        times.drained(0.2)
    assert times.gap_s == pytest.approx(0.1, rel=0.2)


def test_the_longest_gap_between_requests_is_forgotten_after_a_while() -> None:
    gaps = ArrivalGaps()
    for number in range(10):
        gaps.came(number / 10)
    gaps.came(2.9)
    assert gaps.longest_s == pytest.approx(2.0)
    for number in range(30, 50):
        gaps.came(number / 10)
    assert gaps.longest_s == pytest.approx(2.0)
    for number in range(50, 150):
        gaps.came(number / 10)
    assert gaps.longest_s == pytest.approx(0.1)
    gaps.came(100.0)
    assert gaps.longest_s == pytest.approx(85.1)
