"""Tests of the steps by which a collection of Kubernetes is followed."""

import pytest

from kvmesh.mesh.discovery.kubernetes.list_watch import LONGEST_WAIT_S, WATCH_S, ListPart, ListWatch, WaitFor, WatchFrom


def listed(revision: str = "7") -> ListWatch:
    steps = ListWatch(lambda: 0.5)
    assert steps.on_page(revision, "")
    return steps


def test_pages_are_listed_and_then_watched() -> None:
    steps = ListWatch(lambda: 0.5)
    assert steps.next(0.0) == ListPart("")
    assert not steps.on_page("7", "token")
    assert steps.next(0.1) == ListPart("token")
    assert steps.on_page("8", "")
    assert steps.next(0.2) == WatchFrom("8", int(WATCH_S))


def test_watches_of_many_clients_end_at_different_times() -> None:
    ends = set()
    for draw in (0.0, 0.25, 0.999):
        steps = ListWatch(lambda draw=draw: draw)  # type: ignore[misc]
        steps.on_page("7", "")
        step = steps.next(0.0)
        assert isinstance(step, WatchFrom)
        ends.add(step.seconds)
    assert len(ends) == 3


def test_a_watch_that_ends_goes_on_from_what_was_heard() -> None:
    steps = listed("7")
    steps.next(0.0)
    steps.on_heard("9")
    steps.on_end(300.0)
    assert steps.next(300.0) == WatchFrom("9", int(WATCH_S))


def test_an_event_without_a_revision_keeps_the_last_one() -> None:
    steps = listed("7")
    steps.on_heard("")
    assert steps.revision == "7"


def test_a_server_that_ends_every_watch_at_once_is_not_asked_in_a_circle() -> None:
    steps = listed()
    steps.next(10.0)
    steps.on_end(10.1)
    assert isinstance(steps.next(10.1), WaitFor)


@pytest.mark.parametrize("is_gone", [True, False])
def test_whatever_else_ends_a_watch_lists_again(is_gone: bool) -> None:
    steps = listed()
    steps.next(0.0)
    (steps.on_gone if is_gone else steps.on_failure)(100.0)
    step = steps.next(100.0)
    if is_gone:
        assert step == ListPart("")
    else:
        assert step == WaitFor(0.5)
        assert steps.next(100.5) == ListPart("")


def test_a_list_whose_rest_is_forgotten_begins_anew() -> None:
    steps = ListWatch(lambda: 0.5)
    steps.on_page("7", "token")
    steps.on_gone(1.0)
    assert steps.next(1.0) == ListPart("")


def test_a_server_that_forgets_every_time_is_waited_for() -> None:
    steps = listed()
    steps.on_gone(1.0)
    steps.on_page("8", "")
    steps.next(1.0)
    steps.on_gone(1.1)
    assert isinstance(steps.next(1.1), WaitFor)


def test_waits_double_up_to_a_limit_and_are_drawn() -> None:
    for draw, factor in ((0.0, 0.5), (0.5, 1.0)):
        steps = ListWatch(lambda draw=draw: draw)  # type: ignore[misc]
        now_s, waits = 0.0, []
        for _ in range(12):
            steps.on_failure(now_s)
            step = steps.next(now_s)
            assert isinstance(step, WaitFor)
            waits.append(step.seconds / factor)
            now_s += step.seconds
        assert waits[:4] == pytest.approx([0.5, 1.0, 2.0, 4.0])
        assert waits[-1] == pytest.approx(LONGEST_WAIT_S)


def test_a_server_that_has_worked_for_a_while_is_asked_again_soon() -> None:
    steps = listed()
    for _ in range(8):
        steps.on_failure(0.0)
    steps.on_page("7", "")
    steps.next(100.0)
    steps.on_failure(200.0)
    assert steps.next(200.0) == WaitFor(0.5)
