"""Sessions stay with the worker that served them last."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.protocol.ids import WorkerId
from kvmesh.router.affinity import SessionAffinity, SessionKey, session_key
from kvmesh.router.index import Holder
from tests.support.budget import examples

A, A1, B = Holder(WorkerId("a"), 0), Holder(WorkerId("a"), 1), Holder(WorkerId("b"), 0)


def key(name: str) -> SessionKey:
    return session_key("model", "tenant", name)


def test_a_session_goes_where_it_was_served_last() -> None:
    sessions = SessionAffinity()
    assert sessions.get(key("s"), 0.0) is None
    sessions.bind(key("s"), A, 0.0)
    sessions.bind(key("other"), B, 0.0)
    assert sessions.get(key("s"), 1.0) == A
    sessions.bind(key("s"), B, 2.0)
    assert sessions.get(key("s"), 3.0) == B


def test_models_and_tenants_have_sessions_of_their_own() -> None:
    keys = {session_key(*names) for names in [("m", "t", "s"), ("n", "t", "s"), ("m", "u", "s"), ("m", "ts", "")]}
    assert len(keys) == 4


def test_a_long_session_name_takes_no_more_memory() -> None:
    assert len(session_key("m", "t", "x" * 100_000)) == len(session_key("m", "t", "x")) == 16


def test_a_session_lives_on_while_it_is_used() -> None:
    sessions = SessionAffinity(ttl_s=10.0)
    sessions.bind(key("s"), A, 0.0)
    assert sessions.get(key("s"), 9.0) == A
    sessions.bind(key("s"), A, 9.0)
    assert sessions.get(key("s"), 18.9) == A
    assert sessions.get(key("s"), 19.0) is None
    assert (sessions._bindings, sessions._of_worker) == ({}, {})


def test_the_least_recently_used_session_makes_room() -> None:
    sessions = SessionAffinity(max_sessions=2)
    sessions.bind(key("a"), A, 0.0)
    sessions.bind(key("b"), A, 0.0)
    sessions.bind(key("a"), A, 1.0)
    sessions.bind(key("c"), A, 2.0)
    assert [sessions.get(key(name), 3.0) for name in "abc"] == [A, None, A]


def test_with_room_for_none_none_is_kept() -> None:
    sessions = SessionAffinity(max_sessions=0)
    sessions.bind(key("a"), A, 0.0)
    assert (sessions.get(key("a"), 0.0), len(sessions)) == (None, 0)


def test_a_worker_that_left_is_forgotten_with_all_its_ranks() -> None:
    sessions = SessionAffinity()
    for name, holder in {"a": A, "a1": A1, "b": B}.items():
        sessions.bind(key(name), holder, 0.0)
    sessions.forget_worker(WorkerId("a"))
    sessions.forget_worker(WorkerId("unknown"))
    assert [sessions.get(key(name), 0.0) for name in ("a", "a1", "b")] == [None, None, B]
    assert len(sessions) == 1


steps = st.lists(
    st.tuples(st.sampled_from(["get", "bind", "leave"]), st.sampled_from("stuv"), st.sampled_from([A, A1, B]),
              st.integers(0, 4)),
    max_size=60,
)  # fmt: skip


@settings(max_examples=examples(100))
@given(steps, st.integers(1, 4))
def test_affinity_does_what_a_plain_list_does(steps: list, max_sessions: int) -> None:
    sessions, model, now = SessionAffinity(10.0, max_sessions), dict[str, tuple[Holder, int]](), 0
    for what, name, holder, pause in steps:
        now += pause
        model = {name: (held, used) for name, (held, used) in model.items() if used + 10 > now}
        match what:
            case "get":
                assert sessions.get(key(name), now) == model.get(name, (None, 0))[0]
            case "bind":
                model.pop(name, None)
                model = dict(list(model.items())[-(max_sessions - 1) :] if max_sessions > 1 else [])
                model[name] = (holder, now)
                sessions.bind(key(name), holder, now)
            case _:
                model = {name: one for name, one in model.items() if one[0].worker_id != holder.worker_id}
                sessions.forget_worker(holder.worker_id)
        assert len(sessions) <= max_sessions
    for worker in "ab":
        sessions.forget_worker(WorkerId(worker))
    assert (sessions._bindings, sessions._of_worker) == ({}, {})
