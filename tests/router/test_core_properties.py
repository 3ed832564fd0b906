"""The sums are right in any order of events, no request is lost, and nothing remains in the end."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmesh.protocol.errors import DeadlineExceededError, MeshError, NoWorkerError, OverloadedError
from kvmesh.protocol.events import Cleared
from kvmesh.protocol.hashing import unpack_hashes
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import Placed, Role, RouteRequest, Target, WorkerCard
from kvmesh.router.core import Outcome, RouterState
from kvmesh.router.index import Holder
from kvmesh.router.load import NOTHING, Share
from kvmesh.router.queue import MAX_ASKED, QueueRules
from kvmesh.router.rules import Saturation
from tests.support.budget import examples
from tests.support.routing import BLOCK, card, holds, prompt, request, router

LEASE_S = 30.0
MAX_WAITING = 12
PROMPTS = [prompt(number, 8) for number in range(3)]  # and their parts: prefixes are shared
ROUTERS = ("two", "three")
WORKERS = st.sampled_from("abcdef")
POLICIES = st.sampled_from(["kv", "kv", "least-loaded", "power-of-two", "round-robin", "random"])
tokens = st.builds(lambda number, length: PROMPTS[number][:length], st.integers(0, 2), st.integers(1, 8 * BLOCK))


@dataclass
class Booked:
    decode: Holder
    prefill: Holder
    blocks: list[int]
    queued_tokens: int
    ends_s: float
    answer_blocks: int = 1
    is_prefilling: bool = True

    def stands_on(self, worker: str) -> bool:
        return self.decode.worker_id == worker or (self.is_prefilling and self.prefill.worker_id == worker)


@dataclass
class Waits:
    request: RouteRequest
    deadline_s: float


@dataclass
class Counts:
    submitted: int = 0
    placed: int = 0
    failed: int = 0
    cancelled: int = 0
    waiting: dict[str, Waits] = field(default_factory=dict)


class RouterMachine(RuleBasedStateMachine):
    """Plays workers, clients and other routers, and keeps books of its own."""

    @initialize(
        policy=POLICIES,
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        queued_tokens=st.sampled_from([1, 64, 4096]),
        is_patient=st.booleans(),
        affinity_ttl_s=st.sampled_from([0.0, 20.0]),
        predict_ttl_s=st.sampled_from([0.0, 5.0]),
        seed=st.integers(0, 9),
        roles=st.lists(st.sampled_from(["decode", "aggregated", "prefill"]), min_size=1, max_size=4),
    )
    def start(
        self,
        policy: str,
        temperature: float,
        queued_tokens: int,
        is_patient: bool,
        roles: list[str],
        **rules: float,
    ) -> None:
        self.now = 1000.0
        self.policy = policy
        self.is_deterministic = policy in ("kv", "least-loaded") and not temperature
        self.state: RouterState = router(
            policy=policy,
            temperature=temperature,
            saturation=Saturation(queued_tokens) if is_patient else None,
            queue=QueueRules(order="wspt", max_requests=MAX_WAITING),
            lease_s=LEASE_S,
            **rules,  # type: ignore[arg-type]
        )
        self.cards: dict[str, WorkerCard] = {}
        self.booked: dict[str, Booked] = {}
        self.counts = Counts()
        self.elsewhere: dict[str, dict[Holder, Share]] = {name: {} for name in ROUTERS}
        self.names: list[str] = []
        for worker, role in zip("abcd", roles, strict=False):
            self.joins(worker, role=Role(role))

    def teardown(self) -> None:
        if hasattr(self, "state"):
            self.all_ends()

    # --- workers ---------------------------------------------------------------------------------------------------

    @rule(
        worker=WORKERS,
        role=st.sampled_from(list(Role)),
        model=st.sampled_from("mmmx"),
        dp_size=st.sampled_from([1, 1, 2]),
        capacity=st.sampled_from([0.5, 1.0, 2.0]),
        max_num_seqs=st.sampled_from([1, 2, 64]),
        total_blocks=st.sampled_from([4, 12, 1000]),
        kv_events=st.sampled_from(["", "tcp://w:1"]),
        transfer=st.sampled_from(["", "shm", "shm", "shm"]),
    )
    def joins(self, worker: str, **fields: object) -> None:
        known, new = self.cards.get(worker), card(worker, **fields)  # type: ignore[arg-type]
        if known is not None and (known.model, known.role, known.dp_size) != (new.model, new.role, new.dp_size):
            self.forget(worker)
        self.cards[worker] = new
        self.state.add_worker(new, self.now)

    @rule(worker=WORKERS)
    def leaves(self, worker: str) -> None:
        self.forget(worker)
        self.state.remove_worker(WorkerId(worker), self.now)

    @rule(worker=WORKERS, number=st.integers(0, 2), blocks=st.integers(1, 8), dp_rank=st.integers(0, 2))
    def caches(self, worker: str, number: int, blocks: int, dp_rank: int) -> None:
        holds(self.state, worker, blocks, PROMPTS[number], dp_rank)

    @rule(worker=WORKERS)
    def loses_its_cache(self, worker: str) -> None:
        self.state.fleet.on_kv_events(WorkerId(worker), 0, [Cleared()])

    # --- requests --------------------------------------------------------------------------------------------------

    @rule(
        tokens=tokens,
        model=st.sampled_from("mx"),
        tenant=st.sampled_from(["", "a"]),
        priority=st.integers(-1, 1),
        session=st.sampled_from(["", "s", "t"]),
        disaggregate=st.sampled_from([None, None, True, False]),
        pin=st.sampled_from([None, None, None, "a", "b"]),
        pin_rank=st.sampled_from([None, 0, 1]),
        pin_prefill=st.sampled_from([None, None, None, None, "a", "c"]),
        exclude=st.lists(WORKERS, max_size=2).map(tuple),
        explain=st.booleans(),
        patience_s=st.sampled_from([0.0, 3.0, 30.0, 1e9]),
    )
    def comes_with_wishes(self, tokens: list[int], patience_s: float, **fields: object) -> None:
        self.submit(tokens, patience_s, **fields)

    @rule(prompts=st.lists(tokens, min_size=1, max_size=4), tenant=st.sampled_from(["", "a"]))
    def come_at_once(self, prompts: list[list[int]], tenant: str) -> None:
        for one in prompts:
            self.submit(one, 60.0, tenant=tenant)
        self.dispatches()

    def submit(self, tokens: list[int], patience_s: float, **fields: object) -> None:
        asked = request(self.new_name(), tokens, **fields)
        self.counts.submitted += 1
        try:
            displaced = self.state.submit(asked, self.now, self.now + patience_s)
        except (NoWorkerError, OverloadedError):
            self.counts.failed += 1
            return
        self.counts.waiting[asked.request_id] = Waits(asked, self.now + patience_s)
        assert all(isinstance(result, OverloadedError) for _, result in displaced)
        self.settle(displaced)

    @rule()
    def dispatches(self) -> None:
        outcomes = self.state.dispatch(self.now)
        self.settle(outcomes)
        assert all(waits.deadline_s > self.now for waits in self.counts.waiting.values())
        next_s = self.state.next_deadline()
        assert (next_s is None) == (not self.counts.waiting)
        assert next_s is None or next_s > self.now
        assert not self.could_go(), "an idle worker could take it"
        if self.is_deterministic:
            assert self.state.dispatch(self.now) == []

    @precondition(lambda self: self.booked)
    @rule(data=st.data(), exclude=st.lists(WORKERS, max_size=1).map(tuple))
    def migrates(self, data: st.DataObject, exclude: tuple[str, ...]) -> None:
        name = data.draw(st.sampled_from(sorted(self.booked)))
        asked = request(name, data.draw(tokens), exclude=exclude)
        try:
            placed = self.state.place(asked, self.now)
        except NoWorkerError:
            return
        self.book(asked, placed)

    @rule(data=st.data(), decode=WORKERS, prefill=WORKERS, is_prefilling=st.booleans())
    def comes_from_a_router_that_is_gone(
        self, data: st.DataObject, decode: str, prefill: str, is_prefilling: bool
    ) -> None:
        asked = request(self.new_name(), data.draw(tokens))
        there, here = (Target(worker_id=WorkerId(w), name=w, address="", overlap_blocks=1) for w in (prefill, decode))
        placed = Placed(decode=here, prefill=None if prefill == decode else there)
        needed = {decode, prefill} if is_prefilling else {decode}
        try:
            self.state.resume(asked, placed, self.now, is_prefilling=is_prefilling)
        except NoWorkerError:
            assert not needed <= set(self.cards)
            return
        assert needed <= set(self.cards)
        self.book(asked, placed)
        if not is_prefilling:
            self.begun(asked.request_id)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def has_its_first_token(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names))
        self.state.prefill_done(RequestId(name), self.now)
        self.begun(name)

    @precondition(lambda self: self.names)
    @rule(data=st.data(), osl_tokens=st.integers(0, 100))
    def goes_on(self, data: st.DataObject, osl_tokens: int) -> None:
        name = data.draw(st.sampled_from(self.names))
        self.state.progress(RequestId(name), osl_tokens, self.now)
        if (booked := self.booked.get(name)) is not None:
            booked.answer_blocks = 1 + osl_tokens // BLOCK
            booked.ends_s = self.now + LEASE_S

    @precondition(lambda self: self.names)
    @rule(data=st.data(), ok=st.booleans())
    def ends(self, data: st.DataObject, ok: bool) -> None:
        name = data.draw(st.sampled_from(self.names))
        self.state.free(RequestId(name), self.now, ok=ok)
        self.booked.pop(name, None)
        self.counts.cancelled += self.counts.waiting.pop(name, None) is not None

    # --- the rest of the world -------------------------------------------------------------------------------------

    @rule(elapsed_s=st.sampled_from([0.001, 0.5, 3.0, 11.0, 40.0]))
    def time_passes(self, elapsed_s: float) -> None:
        self.now += elapsed_s

    @rule()
    def sweeps(self) -> None:
        expired = self.state.sweep(self.now)
        assert sorted(expired) == sorted(name for name, booked in self.booked.items() if booked.ends_s <= self.now)
        for name in expired:
            del self.booked[name]

    @rule(router=st.sampled_from(ROUTERS), shares=st.dictionaries(WORKERS, st.integers(0, 100), max_size=3))
    def another_router_tells(self, router: str, shares: dict[str, int]) -> None:
        told = {Holder(WorkerId(worker), 0): Share(tokens, tokens // BLOCK, 1) for worker, tokens in shares.items()}
        self.state.load.set_elsewhere(router, told, self.now)
        self.elsewhere[router] = {holder: share for holder, share in told.items() if holder.worker_id in self.cards}

    # --- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def nobody_is_lost_or_counted_twice(self) -> None:
        counts = self.counts
        assert self.state.waiting == len(counts.waiting)
        assert counts.submitted == len(counts.waiting) + counts.placed + counts.failed + counts.cancelled
        assert set(self.booked).isdisjoint(counts.waiting)

    @invariant()
    def what_is_booked_is_what_runs(self) -> None:
        assert len(self.state.load) == len(self.booked)
        own = {holder: self.own(holder) for holder in self.holders()}
        assert self.state.load.shares() == {holder: share for holder, share in own.items() if share != NOTHING}
        for holder, share in own.items():
            shares = [share, *(told[holder] for told in self.elsewhere.values() if holder in told)]
            total = Share(*(sum(values) for values in zip(*shares, strict=True)))
            assert self.state.load.of(holder).total == total
            assert 0 <= self.state.load.of(holder).done_tokens(self.now) <= share.queued_tokens

    @invariant()
    def who_is_busy_is_counted(self) -> None:
        for pool in self.state.fleet.pools.values():
            for busy, slots in ((pool.prefill_busy, pool.prefillers), (pool.decode_busy, pool.decoders)):
                assert busy._busy == sum(slot.load.is_busy for slot in slots)
        for holder in self.holders():
            load = self.state.load.of(holder)
            assert load.is_busy == (load.total.queued_tokens > 0)

    @invariant()
    def memory_is_that_of_the_living(self) -> None:
        state = self.state
        assert set(state.fleet.indexes) == {one.model for one in self.cards.values()}
        assert set(state._queues) == {one.request.model for one in self.counts.waiting.values()}
        assert set(state.fleet.avoided_until) <= set(self.cards)
        assert {one.worker_id for one in state.fleet.cards} == set(self.cards)

    # --- its own books ---------------------------------------------------------------------------------------------

    def new_name(self) -> str:
        self.names = [*self.names, f"request {len(self.names)}"]
        return self.names[-1]

    def holders(self) -> list[Holder]:
        return [Holder(one.worker_id, rank) for one in self.cards.values() for rank in range(one.dp_size)]

    def own(self, holder: Holder) -> Share:
        mine = [one for one in self.booked.values() if one.decode == holder]
        shared = {block for one in mine for block in one.blocks}
        queued = sum(one.queued_tokens for one in self.booked.values() if one.is_prefilling and one.prefill == holder)
        return Share(queued, len(shared) + sum(one.answer_blocks for one in mine), len(mine))

    def settle(self, outcomes: Iterable[Outcome]) -> None:
        for name, result in outcomes:
            waits = self.counts.waiting.pop(name)
            if isinstance(result, MeshError):
                self.counts.failed += 1
                assert isinstance(result, NoWorkerError | OverloadedError | DeadlineExceededError)
                assert waits.deadline_s <= self.now or not isinstance(result, DeadlineExceededError)
                continue
            self.counts.placed += 1
            assert waits.deadline_s > self.now
            self.is_allowed(waits.request, result)
            self.book(waits.request, result)

    def is_allowed(self, asked: RouteRequest, placed: Placed) -> None:
        for target in (placed.decode, placed.prefill or placed.decode):
            one = self.cards[target.worker_id]
            assert one.model == asked.model
            assert target.dp_rank < one.dp_size
            assert target.worker_id not in asked.exclude
        assert self.cards[placed.decode.worker_id].role is not Role.PREFILL
        assert asked.pin in (None, placed.decode.worker_id)
        assert asked.pin is None or asked.pin_rank in (None, placed.decode.dp_rank)
        assert asked.pin_prefill in (None, placed.prefill and placed.prefill.worker_id)
        assert (placed.explanation is not None) == asked.explain
        if placed.prefill is not None:
            both = (self.cards[placed.prefill.worker_id], self.cards[placed.decode.worker_id])
            assert both[0].role is Role.PREFILL
            assert both[0].transfer == both[1].transfer != ""

    def book(self, asked: RouteRequest, placed: Placed) -> None:
        computes = placed.prefill or placed.decode
        self.booked[asked.request_id] = Booked(
            decode=Holder(placed.decode.worker_id, placed.decode.dp_rank),
            prefill=Holder(computes.worker_id, computes.dp_rank),
            blocks=list(unpack_hashes(asked.sequence_hashes)),
            queued_tokens=max(0, asked.isl_tokens - computes.overlap_blocks * BLOCK),
            ends_s=self.now + LEASE_S,
        )

    def begun(self, name: str) -> None:
        if (booked := self.booked.get(name)) is not None and booked.is_prefilling:
            booked.is_prefilling = False
            booked.ends_s = self.now + LEASE_S

    def forget(self, worker: str) -> None:
        self.cards.pop(worker, None)
        self.booked = {name: booked for name, booked in self.booked.items() if not booked.stands_on(worker)}
        for told in self.elsewhere.values():
            for holder in [holder for holder in told if holder.worker_id == worker]:
                del told[holder]

    def could_go(self) -> list[str]:
        """Return requests that wait without need: an idle worker may take them, and no worker has their prefix."""
        assert MAX_WAITING <= MAX_ASKED
        found: list[str] = []
        for name, waits in self.counts.waiting.items():
            asked = waits.request
            may_go_two_ways = asked.disaggregate is not False and self.prefills(asked.model)
            if asked.pin or asked.pin_prefill or asked.exclude or may_go_two_ways:
                continue
            decoders = [h for h in self.holders() if self.may_decode(h, asked.model)]
            trusted = [h for h in decoders if h.worker_id not in self.state.fleet.avoided_until] or decoders
            is_idle = any(self.state.load.of(holder).total == NOTHING for holder in trusted)
            if is_idle and not self.state.fleet.overlaps(asked.model, asked.sequence_hashes, self.now):
                found.append(name)
        return found

    def prefills(self, model: str) -> bool:
        return any(one.model == model and one.role is Role.PREFILL for one in self.cards.values())

    def may_decode(self, holder: Holder, model: str) -> bool:
        one = self.cards[holder.worker_id]
        return one.model == model and one.role is not Role.PREFILL

    # --- the end ---------------------------------------------------------------------------------------------------

    def all_ends(self) -> None:
        """Traffic stops and all callers leave, but for some of which nothing is ever heard."""
        self.settle(self.state.dispatch(self.now))
        for name in self.names[::2]:
            self.state.free(RequestId(name), self.now)
            self.counts.waiting.pop(name, None)
        for name in ROUTERS:
            self.state.load.set_elsewhere(name, {}, self.now)
        self.now += 1e10
        self.settle(self.state.dispatch(self.now))
        self.state.sweep(self.now)
        self.state.fleet.overlaps("m", request().sequence_hashes, self.now)  # predictions end when they are asked for
        self.state.fleet.overlaps("x", request().sequence_hashes, self.now)
        assert self.counts.waiting == {}
        assert (self.state.waiting, len(self.state.load), self.state.load.shares()) == (0, 0, {})
        assert (self.state.load.chains.num_blocks, self.state.load.prefilling.num_blocks) == (0, 0)
        assert all(self.state.load.of(holder).total == NOTHING for holder in self.holders())
        if self.cards:
            both = self.state.fleet.predictions
            for predictions in (both._on_route, both._approximate):
                assert (len(predictions), predictions._chains.num_blocks) == (0, 0)
            assert not mentioned(self.state, set(self.names))
        for worker in list(self.cards):
            self.state.remove_worker(WorkerId(worker), self.now)
        assert (self.state.fleet.cards, self.state.fleet.indexes, self.state.fleet.slots) == ([], {}, {})
        assert not mentioned(self.state.load, set("abcdef"))


def mentioned(root: object, names: set[str]) -> set[str]:
    """Return the `names` that are reachable from an object through its fields, maps and lists."""
    found: set[str] = set()
    seen: set[int] = set()
    to_see = [root]
    while to_see:
        one = to_see.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, str):
            found |= {one} & names
        elif isinstance(one, Mapping):
            to_see += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            to_see += one
        elif is_dataclass(one) or type(one).__module__.startswith("kvmesh.router."):
            to_see += [getattr(one, name) for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            to_see += vars(one).values() if hasattr(one, "__dict__") else ()
    return found


RouterMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=50)
TestRouterStateMachine = RouterMachine.TestCase
