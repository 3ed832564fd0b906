"""The queue decides which request is next, and which is refused."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.protocol.errors import InvalidRequestError, OverloadedError
from kvmesh.protocol.ids import RequestId
from kvmesh.router.queue import IDLE_TENANTS, MAX_ASKED, MAX_RETRY_S, MIN_RETRY_S, Pending, PendingQueue, QueueRules
from tests.support.budget import examples


def item(name: str, tenant: str = "t", priority: int = 0, arrived: float = 0.0, deadline: float = 1e9, isl: int = 100,
         uncached: int | None = None, only: str = "") -> Pending[str]:  # fmt: skip
    return Pending(
        request_id=RequestId(name),
        tenant=tenant,
        priority=priority,
        arrived_s=arrived,
        deadline_s=deadline,
        isl_tokens=isl,
        uncached_tokens=isl if uncached is None else uncached,
        payload=only or name.upper(),
    )


def queue_of(*items: Pending[str], now: float = 0.0, **rules: Any) -> PendingQueue[str]:
    queue = PendingQueue[str](QueueRules(**rules))
    for one in items:
        assert queue.push(one, now) == []
    return queue


def always(_: Pending[str]) -> bool:
    return True


def pop(queue: PendingQueue[str], fits: Callable[[Pending[str]], bool] = always, now: float = 0.0) -> str | None:
    got = queue.pop_next(now, fits)
    return None if got is None else got.request_id


def pop_all(queue: PendingQueue[str], now: float = 0.0) -> str:
    return " ".join(iter(lambda: pop(queue, now=now) or "", ""))


def is_forgotten(queue: PendingQueue[str]) -> bool:
    """Return whether nothing remains of the requests that waited."""
    sums = (queue._held, queue.isl_tokens)
    return (queue._waiting, queue._classes, queue._deadlines, sums) == ({}, {}, [], (0, 0))


# --- order --------------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    queue = queue_of(item("late", arrived=2), item("early", arrived=1, isl=9000), item("later", arrived=3))
    assert pop_all(queue) == "early late later"


def test_a_request_comes_out_as_it_went_in() -> None:
    request = item("r")
    assert queue_of(request).pop_next(0.0, always) is request


def test_equal_requests_leave_in_the_order_of_pushing() -> None:
    assert pop_all(queue_of(*(item(name) for name in "zaz2b".replace("z2", "y")))) == "z a y b"


@pytest.mark.parametrize("order", ["fcfs", "wspt"])
def test_priority_beats_order_and_turn(order: str) -> None:
    queue = queue_of(item("low", isl=1), item("high", "other", priority=1, arrived=9, isl=9000), order=order)
    queue.charge("other", 100_000, priority=1)
    assert pop_all(queue) == "high low"


def test_wspt_serves_the_shortest_uncached_prompt_first() -> None:
    queue = queue_of(item("long", isl=4000), item("cached", isl=8000, uncached=50), item("short"), order="wspt")
    assert pop_all(queue) == "cached short long"


def test_wspt_is_overtaken_only_by_what_comes_soon_after() -> None:
    """A prompt of 8000 tokens, aged with 1000 tokens/s: shorter ones pass it for 8 s."""
    queue = queue_of(
        item("long", isl=8000), item("soon", arrived=7.8), item("too-late", arrived=7.95),
        order="wspt", aging_tokens_per_s=1000.0,
    )  # fmt: skip
    assert pop_all(queue) == "soon long too-late"


def test_wspt_starves_no_long_prompt() -> None:
    """The queue serves one request per second, and one short prompt per second comes: aging lets the long one go."""
    queue = queue_of(item("long", isl=64_000), order="wspt", aging_tokens_per_s=1000.0)
    waited = 0
    while True:
        queue.push(item(f"short-{waited}", arrived=waited, isl=1), waited)
        if pop(queue, now=waited) == "long":
            break
        waited += 1
    assert waited == 64


# --- what fits ----------------------------------------------------------------------------------------


def test_nothing_leaves_while_nothing_fits() -> None:
    queue = queue_of(item("a"), item("b"))
    assert pop(queue, lambda _: False) is None
    assert len(queue) == 2


def test_a_pinned_request_does_not_block_the_others() -> None:
    queue = queue_of(item("pinned", only="w3"), item("free", arrived=1), item("pinned-too", only="w3", arrived=2))
    assert pop(queue, lambda one: one.payload != "w3") == "free"
    assert pop_all(queue) == "pinned pinned-too"


def test_if_the_first_does_not_fit_the_next_goes() -> None:
    queue = queue_of(item("large", priority=1, isl=9000), item("b", arrived=2), item("a", arrived=1))
    assert pop(queue, lambda one: one.isl_tokens < 1000) == "a"


def test_every_tenants_first_request_is_asked_before_second_ones() -> None:
    asked: list[str] = []
    queue = queue_of(*(item(f"{tenant}{i}", tenant) for tenant in "ab" for i in range(2)))
    assert pop(queue, lambda one: bool(asked.append(one.request_id))) is None
    assert asked == ["a0", "b0", "a1", "b1"]


def test_only_so_many_are_asked() -> None:
    asked: list[str] = []
    queue = queue_of(*(item(f"r{i}", f"t{i % 7}", i % 3) for i in range(3 * MAX_ASKED)))
    assert pop(queue, lambda one: bool(asked.append(one.request_id))) is None
    assert len(asked) == len(set(asked)) == MAX_ASKED


def test_a_fits_that_fails_changes_nothing() -> None:
    queue = queue_of(item("a"))
    with pytest.raises(ZeroDivisionError):
        queue.pop_next(0.0, lambda _: bool(1 // 0))
    assert pop_all(queue) == "a"
    assert is_forgotten(queue)


# --- tenants ------------------------------------------------------------------------------------------


def test_tenants_take_turns_by_tokens() -> None:
    """The prompts of one tenant have 300 tokens, of the other 100: three of the other go with each."""
    large = [item(f"L{i}", "large", isl=300) for i in range(2)]
    queue = queue_of(*large, *(item(f"s{i}", "small", isl=100) for i in range(6)))
    assert pop_all(queue) == "L0 s0 s1 s2 L1 s3 s4 s5"


def test_what_is_cached_costs_a_tenant_nothing() -> None:
    queue = queue_of(*(item(f"c{i}", "cached", isl=1000, uncached=10) for i in range(3)), item("u", "other", isl=1000),
                     item("u2", "other", isl=1000))  # fmt: skip
    assert pop_all(queue) == "c0 u c1 c2 u2"


def test_tokens_of_answers_count_too() -> None:
    queue = queue_of(*(item(f"{name}{i}", name) for i in range(2) for name in "ab"))
    assert (pop(queue), pop(queue)) == ("a0", "b0")
    queue.charge("a", 1)
    assert pop_all(queue) == "b1 a1"


def test_the_rules_set_the_cost_of_answer_tokens() -> None:
    queue = queue_of(*(item(f"{name}{i}", name) for i in range(5) for name in "ab"), output_weight=3.0)
    queue.charge("a", 100)
    assert pop_all(queue).split()[:5] == ["b0", "b1", "b2", "a0", "b3"]


def test_a_fully_cached_request_takes_its_turn_too() -> None:
    queue = queue_of(*(item(f"{name}{i}", name, uncached=0) for name in "ab" for i in range(4)))
    queue.charge("b", 1)
    assert pop_all(queue).split()[:5] == ["a0", "a1", "b0", "a2", "b1"]


def test_idle_time_is_not_saved_up() -> None:
    queue = queue_of(*(item(f"busy{i}", "busy") for i in range(20)))
    for _ in range(10):
        pop(queue)
    for i in range(3):
        queue.push(item(f"back{i}", "back"), 0.0)
    assert pop_all(queue).split()[:6] == ["busy10", "back0", "busy11", "back1", "busy12", "back2"]


def test_leaving_for_a_moment_resets_no_counter() -> None:
    queue = queue_of(item("first", "greedy", isl=500), *(item(f"patient{i}", "patient") for i in range(9)))
    assert pop(queue) == "first"
    queue.push(item("second", "greedy", isl=500), 0.0)
    assert pop_all(queue).split()[:6] == [*(f"patient{i}" for i in range(5)), "second"]


def test_a_turn_that_could_not_be_used_is_not_saved() -> None:
    """A tenant whose pinned requests wait for one worker must not have the whole mesh for it later."""
    queue = queue_of(item("pinned", "pins", only="w3"), *(item(f"o{i}", "other") for i in range(20)))
    for _ in range(10):
        pop(queue, lambda one: one.payload != "w3")
    for i in range(3):
        queue.push(item(f"p{i}", "pins"), 0.0)
    assert pop_all(queue).split()[:5] == ["pinned", "o10", "p0", "o11", "p1"]


def test_an_idle_tenant_is_forgotten_once_others_have_caught_up() -> None:
    queue = queue_of(item("a0", "a", isl=300), *(item(f"b{i}", "b") for i in range(9)))
    pop(queue)
    tenants = queue._classes[0]._tenants
    assert set(tenants) == {"a", "b"}
    for _ in range(3):
        pop(queue)
    assert set(tenants) == {"b"}


def test_charges_to_idle_tenants_are_remembered_within_bounds() -> None:
    queue = queue_of(item("a", "a"), item("a2", "a"))
    for i in range(IDLE_TENANTS + 50):
        queue.charge(f"gone{i}", 1000 + i)
    assert len(queue._classes[0]._tenants) == IDLE_TENANTS + 1
    queue.push(item("back", f"gone{IDLE_TENANTS + 49}"), 0.0)
    assert pop_all(queue) == "a a2 back"
    queue.charge("a", 1000)
    assert is_forgotten(queue)


# --- bounds -------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    queue = queue_of(item("a"), item("b"), max_requests=2)
    with pytest.raises(OverloadedError, match=r"2 requests with 200 prompt tokens wait .* retry after 1 s") as refused:
        queue.push(item("c"), 0.0)
    assert refused.value.retry_after_s == 1
    assert pop_all(queue) == "a b"


def test_the_bound_on_tokens_holds_too() -> None:
    queue = queue_of(item("a", isl=600), max_tokens=1000)
    with pytest.raises(OverloadedError):
        queue.push(item("b", isl=401), 0.0)
    assert queue.push(item("b", isl=400), 0.0) == []


def test_what_never_fits_is_refused_by_an_empty_queue() -> None:
    queue = queue_of(max_tokens=1000)
    with pytest.raises(OverloadedError):
        queue.push(item("huge", isl=1001), 0.0)
    assert is_forgotten(queue)


def test_a_tenant_cannot_lock_others_out() -> None:
    """The tenant that holds less gets in. Of the one that holds most, the request served last leaves."""
    queue = queue_of(*(item(f"a{i}", "a") for i in range(4)), max_requests=4)
    assert [gone.request_id for gone in queue.push(item("b0", "b"), 0.0)] == ["a3"]
    assert [gone.request_id for gone in queue.push(item("b1", "b"), 0.0)] == ["a2"]
    for tenant in "ab":
        with pytest.raises(OverloadedError):
            queue.push(item("more", tenant), 0.0)
    assert [gone.request_id for gone in queue.push(item("c0", "c"), 0.0)] == ["b1"], "equals: the last by name"
    assert pop_all(queue) == "a0 b0 c0 a1"


def test_the_fattest_tenant_holds_the_most_tokens() -> None:
    queue = queue_of(item("a0", "a", isl=700), *(item(f"b{i}", "b", isl=50) for i in range(3)), max_tokens=1000)
    assert [gone.request_id for gone in queue.push(item("c0", "c", isl=300), 0.0)] == ["a0"]


def test_of_the_fattest_tenant_the_last_goes() -> None:
    queue = queue_of(item("a0", "a"), item("a2", "a", arrived=2), item("a1", "a", arrived=1), max_requests=3)
    assert [gone.request_id for gone in queue.push(item("b0", "b"), 0.0)] == ["a2"]


def test_a_refusal_displaces_no_request() -> None:
    """The room of the small request would not be enough."""
    queue = queue_of(item("low", isl=100), item("high", "b", 1, isl=900), max_tokens=1000)
    with pytest.raises(OverloadedError):
        queue.push(item("new", "c", 1, isl=950), 0.0)
    assert pop_all(queue) == "high low"


def test_a_higher_priority_displaces_the_lowest_one() -> None:
    queue = queue_of(item("low", priority=-1), item("mid"), item("mid2"), max_requests=3)
    assert [gone.request_id for gone in queue.push(item("high", priority=5), 0.0)] == ["low"]
    assert [gone.request_id for gone in queue.push(item("high2", priority=5), 0.0)] == ["mid2"]
    with pytest.raises(OverloadedError):
        queue.push(item("low2", "other", priority=-1), 0.0)


def test_a_request_waits_only_once() -> None:
    queue = queue_of(item("a"))
    with pytest.raises(InvalidRequestError, match="request a waits"):
        queue.push(item("a"), 0.0)
    assert len(queue) == 1


# --- time ---------------------------------------------------------------------------------------------


def test_a_request_leaves_at_its_deadline() -> None:
    queue = queue_of(item("a", deadline=10), item("b", deadline=8), item("c", deadline=30))
    assert queue.next_deadline() == 8
    assert queue.expire(7.9) == []
    assert [one.request_id for one in queue.expire(8.0)] == ["b"]
    assert [one.request_id for one in queue.expire(100.0)] == ["a", "c"]
    assert queue.next_deadline() is None
    assert is_forgotten(queue)


def test_expired_requests_are_not_handed_out() -> None:
    queue = queue_of(item("old", deadline=5), item("other", "u", deadline=5), item("good", arrived=1))
    assert pop(queue, now=5.0) == "good"
    assert pop(queue, now=5.0) is None
    assert {one.request_id for one in queue.expire(5.0)} == {"old", "other"}


def test_a_cancelled_request_is_gone() -> None:
    queue = queue_of(item("a"), item("b"))
    gone = queue.cancel(RequestId("a"))
    assert gone is not None and gone.payload == "A"
    assert queue.cancel(RequestId("a")) is None
    assert pop_all(queue) == "b"
    assert is_forgotten(queue)


def test_the_wait_is_estimated_from_the_observed_rate() -> None:
    queue = queue_of(*(item(f"r{i}") for i in range(80)))
    assert queue.retry_after_s(0.0) == MIN_RETRY_S, "nothing is known yet"
    pop(queue, now=0.5)
    assert queue.retry_after_s(0.5) == pytest.approx(79 / 2, rel=0.1)
    for half_second in range(2, 61):
        pop(queue, now=half_second / 2)
    assert queue.retry_after_s(30.0) == pytest.approx(10.0, rel=0.1), "20 wait, two a second leave"
    assert queue.refusal(30.0).retry_after_s in (10, 11)


def test_the_wait_in_a_young_queue_is_that_of_earlier_queues() -> None:
    queue = queue_of(*(item(f"r{i}") for i in range(40)))
    newcomer = item("x")
    assert queue.wait_s(newcomer, 0.0, gap_s=0.25) == pytest.approx(41 * 0.25)
    for number in range(1, 21):  # it is twice as slow now
        pop(queue, now=number / 2)
    assert queue.wait_s(newcomer, 10.0, gap_s=0.25) == pytest.approx(21 * 0.5, rel=0.2)


def test_a_queue_that_stands_still_says_so() -> None:
    queue = queue_of(*(item(f"r{i}") for i in range(20)))
    assert queue.retry_after_s(1.0) < queue.retry_after_s(2.0) < queue.retry_after_s(30.0) == MAX_RETRY_S


def test_a_quiet_hour_is_no_slow_hour() -> None:
    queue = queue_of(item("a"))
    pop(queue)
    queue.push(item("b"), 3600.0)
    assert queue.retry_after_s(3600.0) == MIN_RETRY_S


# --- against a model ----------------------------------------------------------------------------------


@dataclass
class Model:
    """A plain model of the queue. It looks at everything each time, and forgets no tenant while its priority waits."""

    rules: QueueRules
    items: list[tuple[int, Pending[str]]] = field(default_factory=list)
    counters: dict[tuple[int, str], tuple[float, int]] = field(default_factory=dict)
    reached: dict[int, float] = field(default_factory=dict)
    ticks: int = 0

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks

    def waiting(self, priority: int) -> set[str]:
        return {one.tenant for _, one in self.items if one.priority == priority}

    def floor(self, priority: int) -> float:
        counters = [self.counters[priority, tenant][0] for tenant in self.waiting(priority)]
        return max(self.reached.get(priority, 0.0), min(counters, default=0.0))

    def place(self, entry: tuple[int, Pending[str]]) -> tuple[float, int]:
        aged = entry[1].uncached_tokens / self.rules.aging_tokens_per_s if self.rules.order == "wspt" else 0.0
        return (entry[1].arrived_s + aged, entry[0])

    def share(self, one: Pending[str]) -> float:
        return max(1 / self.rules.max_requests, one.isl_tokens / self.rules.max_tokens)

    def held(self, priority: int, tenant: str) -> float:
        return sum(self.share(one) for _, one in self.items if (one.priority, one.tenant) == (priority, tenant))

    def take(self, entry: tuple[int, Pending[str]]) -> Pending[str]:
        self.items.remove(entry)
        priority = entry[1].priority
        if not self.waiting(priority):
            self.counters = {key: counter for key, counter in self.counters.items() if key[0] != priority}
            self.reached.pop(priority, None)
        return entry[1]

    def victim(self, new: Pending[str]) -> tuple[int, Pending[str]] | None:
        lowest = min((one.priority for _, one in self.items), default=new.priority)
        if lowest > new.priority:
            return None
        holdings = [(round(self.held(lowest, tenant), 9), tenant) for tenant in self.waiting(lowest)]
        if not holdings:
            return None
        held, fattest = max(holdings)
        mine = self.held(lowest, new.tenant) + self.share(new)
        if lowest == new.priority and held < mine + 1e-9 - self.freed:
            return None
        mine_of = [entry for entry in self.items if (entry[1].priority, entry[1].tenant) == (lowest, fattest)]
        return max(mine_of, key=self.place)

    def push(self, new: Pending[str]) -> list[Pending[str]] | None:
        """Return the displaced requests; None if the new one is refused."""
        before, displaced, self.freed = list(self.items), list[Pending[str]](), 0.0
        saved = (dict(self.counters), dict(self.reached))
        while sum(self.share(one) for _, one in self.items) + self.share(new) > 1 + 1e-9:
            if (entry := self.victim(new)) is None:
                self.items, (self.counters, self.reached) = before, saved
                return None
            if entry[1].priority == new.priority:
                self.freed += self.share(entry[1])
            displaced.append(self.take(entry))
        key = (new.priority, new.tenant)
        floor = self.floor(new.priority)
        if new.tenant not in self.waiting(new.priority) and self.counters.get(key, (0.0, 0))[0] <= floor:
            self.counters[key] = (floor, self.tick())
        self.items.append((self.tick(), new))
        return displaced

    def pop(self, now: float, blocked: set[str]) -> Pending[str] | None:
        live = [e for e in self.items if e[1].deadline_s > now and e[1].payload not in blocked]
        if not live:
            return None
        entry = min(live, key=self.turn)
        priority, key = entry[1].priority, (entry[1].priority, entry[1].tenant)
        self.reached[priority] = max(self.reached.get(priority, 0.0), self.counters[key][0])
        self.counters[key] = (self.reached[priority] + max(1, entry[1].uncached_tokens), self.tick())
        return self.take(entry)

    def turn(self, entry: tuple[int, Pending[str]]) -> tuple[Any, ...]:
        """Return the place of an entry in line: the first of each tenant comes before all second ones."""
        kind = (entry[1].priority, entry[1].tenant)
        ahead = [e for e in self.items if (e[1].priority, e[1].tenant) == kind and self.place(e) < self.place(entry)]
        return (-entry[1].priority, len(ahead), self.counters[kind])

    def charge(self, tenant: str, tokens: int, priority: int) -> None:
        if not self.waiting(priority):
            return
        key = (priority, tenant)
        if tenant not in self.waiting(priority) and self.counters.get(key, (0.0, 0))[0] <= self.floor(priority):
            self.counters[key] = (self.floor(priority), 0)
        self.counters[key] = (self.counters[key][0] + tokens * self.rules.output_weight, self.tick())


tenants, priorities, places = st.sampled_from("abc"), st.integers(0, 2), st.sampled_from(["", "", "w1", "w2"])
steps = st.one_of(
    st.tuples(st.just("push"), tenants, priorities, places, st.integers(1, 60), st.integers(0, 60), st.integers(0, 40)),
    st.tuples(st.just("push"), tenants, priorities, places, st.integers(1, 60), st.integers(0, 60), st.integers(0, 40)),
    st.tuples(st.just("pop"), st.sets(st.sampled_from(["w1", "w2"]))),
    st.tuples(st.just("pop"), st.just(set())),
    st.tuples(st.just("expire")),
    st.tuples(st.just("cancel"), st.integers(0, 60)),
    st.tuples(st.just("charge"), tenants, st.integers(1, 30), priorities),
)
rules = st.builds(
    QueueRules,
    order=st.sampled_from(["fcfs", "wspt"]),
    max_requests=st.integers(1, 12),
    max_tokens=st.integers(50, 300),
    aging_tokens_per_s=st.sampled_from([1.0, 8.0]),
)


@settings(max_examples=examples(150))
@given(rules, st.lists(steps, min_size=20, max_size=60))
def test_the_queue_does_what_the_model_does_and_ends_empty(rules: QueueRules, steps: list[tuple[Any, ...]]) -> None:
    queue, model = PendingQueue[str](rules), Model(rules)
    came, went = Counter[str](), Counter[str]()
    for now, (what, *args) in enumerate(steps):
        match what:
            case "push":
                tenant, priority, only, isl, uncached, patience = args
                new = item(f"r{now}", tenant, priority, now, now + patience, isl, min(isl, uncached), only)
                expected = model.push(new)
                try:
                    displaced = list(queue.push(new, now))
                    came[new.request_id] += 1
                    went.update(one.request_id for one in displaced)
                    assert displaced == expected
                except OverloadedError:
                    assert expected is None
            case "pop":
                (blocked,) = args
                got = queue.pop_next(now, lambda one, blocked=blocked: one.payload not in blocked)
                higher = [one for _, one in model.items if one.deadline_s > now and one.payload not in blocked]
                assert got is None or all(one.priority <= got.priority for one in higher), "priority is strict"
                assert got == model.pop(now, blocked)
                went.update([got.request_id] if got else [])
            case "expire":
                gone = [one.request_id for one in queue.expire(now)]
                late = [entry for entry in model.items if entry[1].deadline_s <= now]
                assert sorted(gone) == sorted(model.take(entry).request_id for entry in late)
                went.update(gone)
            case "cancel":
                gone_one = queue.cancel(RequestId(f"r{args[0]}"))
                mine = [entry for entry in model.items if entry[1].request_id == f"r{args[0]}"]
                assert gone_one == (model.take(mine[0]) if mine else None)
                went.update([gone_one.request_id] if gone_one else [])
            case "charge":
                queue.charge(*args)
                model.charge(*args)
        for priority, waiting in queue._classes.items():
            assert {name for _, name in waiting._holdings} == model.waiting(priority)
        assert len(queue) == len(model.items) <= rules.max_requests
        assert queue.isl_tokens == sum(one.isl_tokens for _, one in model.items) <= rules.max_tokens
        assert queue.next_deadline() == min((one.deadline_s for _, one in model.items), default=None)
    while (got := queue.pop_next(-1.0, always)) is not None:
        assert got == model.pop(-1.0, set())
        went[got.request_id] += 1
    assert went == came, "none is lost, none comes out twice"
    assert is_forgotten(queue)


sizes = st.lists(st.integers(1, 500), min_size=5, max_size=40)


@settings(max_examples=examples(100))
@given(sizes, sizes, st.lists(st.tuples(st.integers(0, 30), st.integers(1, 500)), max_size=20), st.randoms())
def test_two_tenants_that_always_wait_are_served_alike(
    ours: list[int], theirs: list[int], visits: list[tuple[int, int]], rng: Any
) -> None:
    """The service differs by at most twice the largest request, with its answer, in any span of time."""
    queue = queue_of(
        *(item(f"a{i}", "a", isl=isl) for i, isl in enumerate(ours)),
        *(item(f"b{i}", "b", isl=isl) for i, isl in enumerate(theirs)),
    )
    visitors, largest, lead = sorted(visits), 0.0, [0.0]
    while {"a", "b"} <= {waiting.item.tenant for waiting in queue._waiting.values()}:
        while visitors and visitors[0][0] <= len(lead):
            queue.push(item(f"v{len(visitors)}", f"v{len(visitors) % 3}", isl=visitors.pop(0)[1]), 0.0)
        got = queue.pop_next(0.0, always)
        assert got is not None
        answer = rng.randrange(100)
        queue.charge(got.tenant, answer)
        served = got.uncached_tokens + 2.0 * answer
        largest = max(largest, served)
        lead.append(lead[-1] + {"a": served, "b": -served}.get(got.tenant, 0.0))
    assert max(lead[:-1]) - min(lead[:-1]) <= 2 * largest


arrivals = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4000), st.booleans()), min_size=1, max_size=60)


@settings(max_examples=examples(100))
@given(arrivals)
def test_under_wspt_a_prompt_is_overtaken_only_within_its_bound(arrivals: list[tuple[int, int, bool]]) -> None:
    queue, now = queue_of(order="wspt", aging_tokens_per_s=500.0), 0
    for number, (pause, isl, serve) in enumerate(arrivals):
        now += pause
        queue.push(item(f"r{number}", arrived=now, isl=isl), now)
        got = queue.pop_next(now, always) if serve else None
        for waiting in queue._waiting.values() if got else []:
            assert got is not None
            assert got.arrived_s <= waiting.item.arrived_s + waiting.item.uncached_tokens / 500.0
