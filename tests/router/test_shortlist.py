"""Few workers are weighed, and the choice is the same as if all had been."""

from collections.abc import Callable
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import Placed
from kvmesh.router.core import RouterState
from kvmesh.router.index import Holder
from kvmesh.router.load import Share
from kvmesh.router.placing import FEW, look, plan
from kvmesh.router.rules import Saturation
from kvmesh.router.shortlist import Shelves
from tests.support.routing import A, D, P, card, holds, prompt, request, results, router, where

NOBODY: frozenset[Holder] = frozenset()
ROLES = {"prefill": P, "decode": D, "aggregated": A}
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["place", "place", "submit", "first token", "grow", "end", "store", "elsewhere", "card", "join", "fail"]
        ),
        st.integers(0, FEW + 7),  # a worker, or a request
        st.integers(1, 20),  # blocks
        st.sampled_from([0.0, 0.0, 0.01, 0.5, 7.0]),  # s until then
    ),
    max_size=60,
)


def at(worker: str) -> Holder:
    return Holder(WorkerId(worker), 0)


def shelves(**loads: tuple[int, int, int]) -> Shelves[str]:
    """Workers of one kind: queued tokens, held blocks, requests of each."""
    made: Shelves[str] = Shelves()
    for name, load in loads.items():
        made.put(at(name), name, "kind", Share(*load), last_chosen=0)
    return made


# --- who is weighed ------------------------------------------------------------------------------------------------


def test_of_equal_idle_workers_only_the_longest_unchosen_is_scored() -> None:
    made: Shelves[str] = Shelves()
    for name, last_chosen in (("a", 7), ("b", 3), ("c", 5)):
        made.put(at(name), name, "kind", Share(0, 10, 1), last_chosen)
    assert made.shortlist(NOBODY) == ["b"]
    assert made.shortlist({at("b")}) == ["b", "c"], "one of whom more is known stands for nobody"


def test_a_more_loaded_worker_than_an_idle_one_is_skipped() -> None:
    made = shelves(idle=(0, 10, 1), held=(0, 11, 1), busy=(500, 11, 2), fewer=(0, 12, 0), as_many=(500, 10, 2))
    assert made.shortlist(NOBODY) == ["as_many", "fewer", "idle"]


def test_a_busy_worker_replaces_no_other_in_the_shortlist() -> None:
    assert shelves(busy=(500, 1, 1), other=(400, 2, 1)).shortlist(NOBODY) == ["busy", "other"]


def test_workers_of_another_kind_are_weighed_too() -> None:
    made = shelves(a=(0, 0, 0))
    made.put(at("fast"), "fast", "another kind", Share(900, 90, 9), last_chosen=1)
    assert made.shortlist(NOBODY) == ["a", "fast"]


def test_a_worker_that_left_is_not_scored_or_kept() -> None:
    made = shelves(a=(0, 0, 0), b=(0, 5, 1))
    made.put(at("a"), "a", "kind", Share(0, 6, 1), last_chosen=1)
    assert made.shortlist(NOBODY) == ["b"]
    made.remove(at("b"))
    made.remove(at("b"))
    assert made.shortlist({at("b")}) == ["a"]


def test_of_many_idle_workers_one_is_weighed() -> None:
    state = router(*(card(f"d{number:03}") for number in range(200)))
    planned = plan(look(state.fleet, state.rules, request(), 100.0, Random(0)))
    assert len(planned.first.candidates) == 1
    explained = state.place(request("other", explain=True), 100.0).explanation
    assert explained is not None
    assert len(explained.candidates) == 64, "who asks for reasons is told of others"


def test_a_worker_that_joins_or_fails_makes_nobody_else_be_weighed() -> None:
    state = router(*(card(f"d{number:03}") for number in range(200)))
    state.add_worker(card("new"), 100.0)
    planned = plan(look(state.fleet, state.rules, request(), 100.1, Random(0)))
    assert [c.holder.worker_id for c in planned.first.candidates] == ["d000"], "of idle ones one stands for all"
    state.load.book(RequestId("r"), decode=at("new"), prefill=at("new"), prefill_tokens=0, hashes=b"", now=100.1)
    planned = plan(look(state.fleet, state.rules, request(), 100.1, Random(0)))
    assert [c.holder.worker_id for c in planned.first.candidates] == ["d000"], "it may take no second one yet"
    state.fleet.avoid([WorkerId("d000"), WorkerId("new")], 100.2)
    planned = plan(look(state.fleet, state.rules, request(), 100.2, Random(0)))
    assert [c.holder.worker_id for c in planned.first.candidates] == ["d001"]


def test_newcomers_are_weighed_where_no_other_can_follow_the_prefill_worker() -> None:
    state = router(card("p", P, transfer="nixl"), *(card(f"d{number:03}") for number in range(20)))
    for name in ("new0", "new1"):
        state.add_worker(card(name, transfer="nixl"), 100.0)
        state.load.update_elsewhere("two", {at(name): Share(0, 10, 1)}, 100.0)
    planned = plan(look(state.fleet, state.rules, request(disaggregate=True), 100.0, Random(0)))
    assert (planned.first.chosen.holder, planned.last.chosen.holder) == (at("p"), at("new0"))


# --- the choice is the same ----------------------------------------------------------------------------------------


@given(
    roles=st.lists(st.sampled_from([*ROLES, "decode", "decode"]), min_size=FEW, max_size=FEW + 8),
    steps=STEPS,
    queued_tokens=st.sampled_from([64, 2048, 1 << 30]),
)
def test_the_shortlist_does_not_change_the_choice(
    roles: list[str], steps: list[tuple[str, int, int, float]], queued_tokens: int
) -> None:
    """A request that wants reasons has all workers weighed; two routers, of which one is always asked for them."""
    short, whole = pair = [_mesh(roles, queued_tokens) for _ in range(2)]
    now, placed = 100.0, list[str]()
    for number, (step, which, blocks, later_s) in enumerate(steps):
        now += later_s
        name = f"r{number}"
        if step in ("place", "submit"):
            outcomes = [_ask(state, step, name, which % 3, blocks, now, state is whole) for state in pair]
            assert outcomes[0] == outcomes[1]
            placed.append(name)
            continue
        target = placed[which % len(placed)] if placed else name
        act = _acts(step, target, f"w{which % len(roles):02}", blocks, now)
        assert act(short) == act(whole)
    assert short.load.shares() == whole.load.shares()


LOADS = [(0, 0, 0), (0, 10, 1), (0, 20, 2), (0, 40, 5), (300, 10, 1), (300, 40, 3)]
WORKERS = st.tuples(
    st.sampled_from([*ROLES, "aggregated"]),
    st.sampled_from(["settled", "new", "new", "avoided"]),
    st.sampled_from(["shm", "shm", "nixl"]),
    st.integers(0, 2),  # which of the loads
    st.sampled_from([0, 0, 0, 2]),  # blocks of the prompt
)


@given(
    workers=st.lists(WORKERS, min_size=FEW, max_size=FEW + 8),
    loads=st.lists(st.sampled_from(LOADS), min_size=3, max_size=3),  # few: where one is idle, nothing else counts
    age_s=st.sampled_from([0.0, 2.0, 5.0, 9.9]),
)
def test_newcomers_and_avoided_workers_do_not_change_the_choice(
    workers: list[tuple[str, str, str, int, int]], loads: list[tuple[int, int, int]], age_s: float
) -> None:
    now = 100.0
    state = router(card("z", D))
    state.load.update_elsewhere("two", {at("z"): Share(0, 50, 5)}, now)
    in_time = sorted(enumerate(workers), key=lambda one: one[1][1] == "new")
    for number, (role, past, transfer, load, blocks) in in_time:
        name = f"w{number:02}"
        state.add_worker(card(name, ROLES[role], transfer=transfer), now - age_s if past == "new" else 0.0)
        state.load.update_elsewhere("two", {at(name): Share(*loads[load])}, now)
        holds(state, name, blocks, prompt(0))
    state.fleet.avoid([WorkerId(f"w{n:02}") for n, (_, past, *_) in enumerate(workers) if past == "avoided"], now)
    for wish in (None, True, False):
        asked = request(tokens=prompt(0), disaggregate=wish)
        short, whole = (plan(look(state.fleet, state.rules, asked, now, Random(0), scores_all=all_)) for all_ in (0, 1))
        assert [leg.chosen for leg in short.legs] == [leg.chosen for leg in whole.legs]
        assert short.reason == whole.reason


def _mesh(roles: list[str], queued_tokens: int) -> RouterState:
    sizes = [{"total_blocks": 60, "max_num_seqs": 3}, {"total_blocks": 1000}]
    peers = [{"kv_print": "same", "prefill_token_s": 0.001}, {}]
    cards = [card(f"w{n:02}", ROLES[role], **sizes[n % 5 == 0], **peers[n % 3 == 0]) for n, role in enumerate(roles)]
    return router(card("z", D), *cards, saturation=Saturation(queued_tokens=queued_tokens))


def _ask(state: RouterState, step: str, name: str, number: int, blocks: int, now: float, explain: bool) -> object:
    asked = request(name, prompt(number, blocks), explain=explain)
    if step == "place":
        return _facts(state.place(asked, now))
    state.submit(asked, now)
    return results(state.dispatch(now))


def _facts(placed: Placed) -> object:
    return where(placed), placed.reason, placed.decode.overlap_blocks, placed.source


def _acts(step: str, name: str, worker: str, blocks: int, now: float) -> Callable[[RouterState], object]:
    def act(state: RouterState) -> object:
        match step:
            case "first token":
                state.prefill_done(RequestId(name), now)
            case "grow":
                state.progress(RequestId(name), blocks * 16, now)
            case "end":
                state.free(RequestId(name), now)
            case "store":
                holds(state, worker, blocks, prompt(blocks % 3))
            case "elsewhere":
                state.load.update_elsewhere("two", {at(worker): Share(blocks % 3 * 500, blocks, blocks % 4)}, now)
            case "join":
                kind = {"max_num_seqs": 4, "transfer": ["shm", "nixl"][blocks % 2]}
                state.add_worker(card(f"n{worker}", [D, A, P][blocks % 3], **kind), now)
            case "fail":
                state.fleet.avoid([WorkerId(worker)], now)
            case "card":
                known = next(one for one in state.fleet.cards if one.worker_id == worker)
                state.add_worker(replace(known, capacity=1.0 + blocks % 2), now)
        return results(state.dispatch(now))

    return act
