"""Test how many files this process may have open."""

import resource
from collections.abc import Iterator

import pytest

from kvmesh.mesh.http.files import make_room_for_files


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Yield (soft, hard) limits, with the soft one lowered for the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowered = soft - 10 if soft != resource.RLIM_INFINITY else 4096
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowered, hard))
    yield lowered, hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_is_raised_as_far_as_is_wanted(limits: tuple[int, int]) -> None:
    soft, hard = limits
    assert make_room_for_files(soft + 5) == soft + 5
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft + 5, hard)


def test_a_limit_that_is_high_enough_stays(limits: tuple[int, int]) -> None:
    assert make_room_for_files(10) == limits[0]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits


def test_the_hard_limit_is_the_end(limits: tuple[int, int]) -> None:
    hard = limits[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this process has no hard limit")
    assert make_room_for_files(hard + 1) == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
