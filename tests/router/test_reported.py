"""Load that workers report: it is added to the bookings, it ends, and it never counts a booking twice."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import LoadReport
from kvmesh.router.core import RouterState
from kvmesh.router.index import Holder
from kvmesh.router.load import NOTHING, ActiveLoad, Share
from kvmesh.router.reported import ReportedLoad
from tests.support.routing import A, card, prompt, request, router

W = WorkerId("w1")
HOLDER = Holder(W, 0)


def followed() -> tuple[ActiveLoad, ReportedLoad]:
    load = ActiveLoad()
    load.join(HOLDER)
    return load, ReportedLoad(load)


def book(load: ActiveLoad, name: str, tokens: int, now: float) -> None:
    load.book(RequestId(name), decode=HOLDER, prefill=HOLDER, prefill_tokens=tokens, hashes=b"", now=now)


# --- outside callers -----------------------------------------------------------------------------------------------


def test_outside_callers_add_to_what_is_booked() -> None:
    load, reported = followed()
    book(load, "r", 40, 0.0)
    assert reported.on_report(W, LoadReport(outside_requests=3, outside_blocks=50), 0.0)
    assert load.of(HOLDER).total == Share(40, 1 + 50, 1 + 3)
    assert load.of(HOLDER).unbooked == reported.total == Share(0, 50, 3)
    assert load.shares() == {HOLDER: Share(40, 1, 1)}, "other routers hear of it from the worker"


def test_each_report_replaces_the_last() -> None:
    load, reported = followed()
    reported.on_report(W, LoadReport(outside_requests=3), 0.0)
    assert reported.on_report(W, LoadReport(outside_requests=1), 0.1)
    assert not reported.on_report(W, LoadReport(outside_requests=1), 0.2), "nothing has changed"
    assert load.of(HOLDER).total.requests == 1
    assert reported.on_report(W, LoadReport(), 0.3)
    assert (load.of(HOLDER).total, reported.next_s()) == (NOTHING, None)


def test_a_report_ends_when_it_is_not_repeated() -> None:
    load, reported = followed()
    reported.on_report(W, LoadReport(outside_requests=3, valid_s=3.0), 0.0)
    reported.on_report(W, LoadReport(outside_requests=3, valid_s=3.0), 1.0)
    assert (reported.next_s(), reported.expire(3.9)) == (4.0, False)
    assert reported.expire(4.0)
    assert load.of(HOLDER).total == NOTHING


def test_a_worker_that_stops_reporting_is_forgotten() -> None:
    load, reported = followed()
    reported.on_report(W, LoadReport(outside_requests=3, queued_tokens=10), 0.0)
    assert reported.forget(W, 0.1)
    assert not reported.forget(W, 0.1)
    assert (load.of(HOLDER).total, load.of(HOLDER).most_backlog, reported.next_s()) == (NOTHING, None, None)


def test_reports_of_unknown_workers_and_ranks_are_dropped() -> None:
    _, reported = followed()
    assert not reported.on_report(WorkerId("w2"), LoadReport(outside_requests=3), 0.0)
    assert not reported.on_report(W, LoadReport(dp_rank=1, outside_requests=3), 0.0)
    assert (reported.total, reported.next_s()) == (NOTHING, None)


def test_each_rank_has_a_report_of_its_own() -> None:
    load, reported = followed()
    load.join(Holder(W, 1))
    reported.on_report(W, LoadReport(dp_rank=1, outside_requests=2), 0.0)
    assert (load.of(HOLDER).total, load.of(Holder(W, 1)).total) == (NOTHING, Share(requests=2))


# --- prompt tokens -------------------------------------------------------------------------------------------------


def test_tokens_beyond_the_bookings_are_work_still_to_do() -> None:
    load, reported = followed()
    reported.on_report(W, LoadReport(queued_tokens=100), 0.0)  # the first: what was booked before is not known
    assert load.of(HOLDER).unbooked == NOTHING
    for now in (0.6, 1.2):
        reported.on_report(W, LoadReport(queued_tokens=1000), now)
    book(load, "r", 400, 1.3)
    reported.on_report(W, LoadReport(queued_tokens=1000), 1.4)
    assert load.of(HOLDER).unbooked == Share(600), "of which 400 are booked by now"


def test_a_slower_worker_has_more_to_compute_than_its_bookings_say() -> None:
    load, reported = followed()
    book(load, "first", 1000, 0.0)
    load.prefill_done(RequestId("first"), 1.0)  # so it computes 1000 tokens/s
    reported.on_report(W, LoadReport(queued_tokens=1), 1.0)
    book(load, "second", 4000, 1.0)
    for tenth in range(1, 31):
        now = 1.0 + tenth / 10
        reported.on_report(W, LoadReport(queued_tokens=4000 - 25 * tenth), now)  # it has come to 250 tokens/s
    booked, known = 4000 - 0.8 * 3000, 4000 - 750
    assert load.of(HOLDER).backlog(4.0) == booked
    unbooked = load.of(HOLDER).unbooked.queued_tokens
    assert known - booked - 900 <= unbooked <= known - booked, "what was booked up to 1 s ago is compared"


def test_a_prompt_that_has_just_ended_is_not_counted_again() -> None:
    load, reported = followed()
    reported.on_report(W, LoadReport(queued_tokens=1), 0.0)
    book(load, "r", 1000, 0.0)
    load.free(RequestId("r"), 0.1)  # its caller has left; the worker does not know it yet
    assert not reported.on_report(W, LoadReport(queued_tokens=1000), 0.15)
    assert load.of(HOLDER).total == NOTHING


def test_a_booking_that_is_heard_of_after_the_report_is_not_counted_twice() -> None:
    load, reported = followed()
    for now in (0.0, 0.6, 1.2):
        reported.on_report(W, LoadReport(queued_tokens=1000), now)
    assert load.of(HOLDER).total == Share(1000)
    load.update_elsewhere("other", {HOLDER: Share(700, 9, 1)}, 1.205)
    assert load.of(HOLDER).total == Share(300 + 700, 9, 1)
    load.update_elsewhere("other", {HOLDER: Share(0, 9, 1)}, 1.21)
    assert load.of(HOLDER).unbooked == Share(300)


def test_work_beyond_a_booking_ends_with_its_first_token() -> None:
    load, reported = followed()
    reported.on_report(W, LoadReport(queued_tokens=1), 0.0)
    book(load, "r", 400, 0.5)
    for now in (0.6, 1.2):
        reported.on_report(W, LoadReport(queued_tokens=700), now)
    assert load.of(HOLDER).total.queued_tokens == 700
    load.prefill_done(RequestId("r"), 1.3)
    assert load.of(HOLDER).total.queued_tokens == 0, "before the next report"


@dataclass
class SimpleWorker:
    """Computes prompts one after the other, at 1,000 tokens/s, and hears and reports with a lag."""

    lag_s: float
    queue: deque[tuple[str, float]] = field(default_factory=deque)  # names and remaining tokens
    inbox: deque[tuple[float, str, str, int]] = field(default_factory=deque)  # when, what, name, tokens
    outbox: deque[tuple[float, str, int]] = field(default_factory=deque)  # when, "done" or "report", tokens
    done: list[str] = field(default_factory=list)

    def advance(self, now: float, dt: float) -> None:
        """Compute from now - dt until now, then hear what has come."""
        self.compute(now, 1000.0 * dt)
        while self.inbox and self.inbox[0][0] <= now:
            _, what, name, tokens = self.inbox.popleft()
            if what == "add":
                self.queue.append((name, tokens))
            else:
                self.queue = deque(one for one in self.queue if one[0] != name)

    def compute(self, now: float, left: float) -> None:
        while self.queue and left > 0:
            name, tokens = self.queue.popleft()
            if tokens > left:
                self.queue.appendleft((name, tokens - left))
            else:
                self.outbox.append((now + self.lag_s, name, -1))
            left -= tokens

    def certain_tokens(self) -> int:
        return int(sum(tokens for _, tokens in self.queue))


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([0.0, 0.01, 0.05, 0.15]), st.sampled_from([0.5, 3.0, 12.0]))
def test_without_outside_callers_no_load_is_unbooked(seed: int, lag_s: float, rate: float) -> None:
    """Under churn, with requests that end, are cancelled and take a while to arrive, as with one router alone."""
    rng = random.Random(seed)
    load, reported = followed()
    worker = SimpleWorker(lag_s)
    open_requests: list[str] = []
    reports_due, number, dt = 0.0, 0, 0.01
    for step in range(1000):
        now = step * dt
        if rng.random() < rate * dt:
            number += 1
            name, tokens = f"r{number}", rng.choice([20, 200, 2000])
            book(load, name, tokens, now)
            open_requests.append(name)
            worker.inbox.append((now + lag_s, "add", name, tokens))
        if open_requests and rng.random() < 0.2 * rate * dt:
            name = open_requests.pop(rng.randrange(len(open_requests)))
            load.free(RequestId(name), now)
            worker.inbox.append((now + lag_s, "cancel", name, 0))
        worker.advance(now, dt)
        if now >= reports_due:
            reports_due = now + 0.1
            worker.outbox.append((now + lag_s, "", worker.certain_tokens()))
        while worker.outbox and worker.outbox[0][0] <= now:
            _, name, tokens = worker.outbox.popleft()
            if name:
                load.prefill_done(RequestId(name), now)
                continue
            reported.on_report(W, LoadReport(queued_tokens=tokens), now)
            assert load.of(HOLDER).unbooked == NOTHING
            assert load.of(HOLDER).total == load.of(HOLDER).own


# --- placements ----------------------------------------------------------------------------------------------------


def shares_of_placements(state: RouterState, count: int) -> dict[str, int]:
    """Place requests one after the other, each of which runs until four later ones are placed."""
    placed: dict[str, int] = {}
    for number in range(count):
        name = state.place(request(f"r{number}", prompt(number)), now=float(number)).decode.name
        placed[name] = placed.get(name, 0) + 1
        state.prefill_done(RequestId(f"r{number}"), number + 0.5)
        if number >= 4:
            state.free(RequestId(f"r{number - 4}"), number + 0.6)
    return placed


def test_a_server_with_outside_callers_gets_fewer_requests() -> None:
    state = router(card("a1", A), card("b1", A))
    assert shares_of_placements(state, 100) == {"a": 50, "b": 50}
    state = router(card("a1", A), card("b1", A))
    half_of_its_blocks = LoadReport(outside_requests=8, outside_blocks=500, valid_s=1000)
    state.reported.on_report(WorkerId("a1"), half_of_its_blocks, 0.0)
    assert shares_of_placements(state, 100) == {"b": 100}


def test_outside_callers_can_fill_a_server() -> None:
    state = router(card("a1", A, max_num_seqs=8), card("b1", A, max_num_seqs=8))
    state.reported.on_report(WorkerId("a1"), LoadReport(outside_requests=8), 0.0)
    placed = [state.try_place(request(f"r{n}", prompt(n, 1)), now=float(n)) for n in range(9)]
    assert [one.decode.name for one in placed if one is not None] == ["b"] * 8
    assert placed[8] is None, "both are full, so it waits"


def test_an_explanation_names_the_unbooked_load() -> None:
    state = router(card("a1", A), card("b1", A))
    state.reported.on_report(WorkerId("a1"), LoadReport(outside_requests=2, outside_blocks=30), 0.0)
    explanation = state.preview(request(), 0.0).explanation
    assert explanation is not None
    found = {c.worker: (c.requests, c.unbooked_requests, c.unbooked_blocks) for c in explanation.candidates}
    assert found == {"a": (2, 2, 30), "b": (0, 0, 0)}


@pytest.mark.parametrize("ends", ["leaves", "stops"])
def test_a_worker_that_is_gone_leaves_nothing_behind(ends: str) -> None:
    state = router(card("a1", A))
    state.reported.on_report(WorkerId("a1"), LoadReport(outside_requests=2), 0.0)
    if ends == "leaves":
        state.remove_worker(WorkerId("a1"))
    else:
        state.reported.forget(WorkerId("a1"), 1.0)
    assert (state.reported.total, state.reported.next_s()) == (NOTHING, None)
