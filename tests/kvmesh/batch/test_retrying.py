"""Tests of the decision to send a request of a batch again."""

import random

import pytest

from kvmesh.commands.batch.retrying import (
    BUSY_TRIES,
    FAILED_TRIES,
    LONGEST_WAIT_S,
    UNREACHABLE,
    OutageWatch,
    wait_before_retry,
)

RNG = random.Random(1)


@pytest.mark.parametrize("status", [200, 400, 401, 404, 413, 422])
def test_an_answer_that_would_come_again_counts(status: int) -> None:
    assert wait_before_retry(status, 1, None, RNG) is None


@pytest.mark.parametrize(
    ("status", "tries"),
    [(429, BUSY_TRIES), (503, BUSY_TRIES), (UNREACHABLE, BUSY_TRIES), (500, FAILED_TRIES), (504, FAILED_TRIES)],
)
def test_each_kind_of_failure_has_its_number_of_tries(status: int, tries: int) -> None:
    assert wait_before_retry(status, tries - 1, None, RNG) is not None
    assert wait_before_retry(status, tries, None, RNG) is None


def test_the_wait_doubles_up_to_its_limit() -> None:
    for tries in range(1, BUSY_TRIES):
        longest_s = min(0.5 * 2 ** (tries - 1), LONGEST_WAIT_S)
        wait_s = wait_before_retry(503, tries, None, RNG)
        assert wait_s is not None
        assert longest_s / 2 <= wait_s <= longest_s


@pytest.mark.parametrize(("asked_s", "least_s"), [(5.0, 5.0), (3600.0, LONGEST_WAIT_S)])
def test_a_server_may_ask_for_a_longer_wait(asked_s: float, least_s: float) -> None:
    assert wait_before_retry(429, 1, asked_s, RNG) == least_s


def test_the_batch_ends_when_every_request_fails_for_long() -> None:
    outage = OutageWatch(10.0)
    outage.on_start("a")
    outage.on_start("b")
    assert not outage.on_failure("a", 0.0)
    assert not outage.on_failure("a", 100.0), "b may still be answered"
    assert not outage.on_failure("b", 100.0)
    assert not outage.on_failure("a", 109.0)
    assert outage.on_failure("b", 110.0)


def test_an_answer_gives_new_outage() -> None:
    outage = OutageWatch(10.0)
    outage.on_start("a")
    outage.on_start("b")
    outage.on_failure("a", 0.0)
    outage.on_failure("b", 0.0)
    outage.on_answer("b")
    assert not outage.on_failure("a", 9.0)
    assert not outage.on_failure("a", 18.0)
    assert outage.on_failure("a", 19.0)


def test_a_request_that_is_given_up_counts_no_more() -> None:
    outage = OutageWatch(10.0)
    outage.on_start("a")
    outage.on_start("b")
    outage.on_give_up("a")
    assert not outage.on_failure("b", 0.0)
    assert outage.on_failure("b", 10.0)
