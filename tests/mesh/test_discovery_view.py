"""Tests of the decision which keys of a discovery backend count."""

from kvmesh.mesh.discovery import view as module
from kvmesh.mesh.discovery.view import KeyView


def test_a_list_shows_its_keys() -> None:
    view = KeyView(10.0)
    view.on_list({"a": b"1", "b": b"2"}, 0.0)
    assert view.present() == {"a": b"1", "b": b"2"}


def test_a_key_that_a_list_lacks_counts_for_one_more_lease() -> None:
    view = KeyView(10.0)
    view.on_list({"a": b"1"}, 0.0)
    view.on_list({}, 100.0)
    view.on_list({}, 105.0)
    view.on_time(109.0)
    assert (view.present(), view.lapsed()) == ({"a": b"1"}, frozenset())
    view.on_time(110.0)
    assert (view.present(), view.lapsed()) == ({}, {"a"})


def test_no_lease_counts_while_the_backend_is_away() -> None:
    """A server that comes back empty and fails again has not given the owners the time to return."""
    view = KeyView(10.0)
    view.on_list({"a": b"1"}, 0.0)
    view.on_list({}, 100.0)
    view.on_away()
    view.on_list({}, 200.0)
    view.on_time(209.0)
    assert view.present() == {"a": b"1"}
    view.on_time(210.0)
    assert view.lapsed() == {"a"}


def test_an_owner_that_returns_in_time_was_never_away() -> None:
    view = KeyView(10.0)
    view.on_list({"a": b"1"}, 0.0)
    view.on_list({}, 100.0)
    view.on_put("a", b"1")
    view.on_time(200.0)
    assert view.present() == {"a": b"1"}


def test_an_empty_value_withdraws_a_key_at_once() -> None:
    view = KeyView(10.0)
    view.on_list({"a": b"1", "b": b"2"}, 0.0)
    view.on_put("a", b"")
    view.on_list({"b": b""}, 1.0)
    assert view.present() == {}
    view.on_lapse("a")
    assert view.lapsed() == frozenset()


def test_a_key_whose_lease_has_ended_is_known_as_lapsed_until_it_returns() -> None:
    view = KeyView(10.0)
    view.on_put("a", b"1")
    view.on_lapse("a")
    assert (view.present(), view.lapsed()) == ({}, {"a"})
    view.on_put("a", b"1")
    assert (view.present(), view.lapsed()) == ({"a": b"1"}, frozenset())


def test_the_memory_of_lapsed_keys_is_bounded() -> None:
    view = KeyView(10.0)
    for n in range(module.MAX_LAPSED + 5):
        view.on_put(str(n), b"1")
        view.on_lapse(str(n))
    assert len(view.lapsed()) == module.MAX_LAPSED
    assert "4" not in view.lapsed()
