"""The dispatcher carries a request through the mesh, when workers do well, fail, vanish or are given up."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvmesh.frontend import dispatch, route_requests
from kvmesh.frontend.dispatch import Dispatcher
from kvmesh.frontend.generator import MAX_EXPLANATIONS, Hints, Trace
from kvmesh.frontend.presence import FailedWorker
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.errors import (
    CancelledByPeerError,
    DeadlineExceededError,
    DrainingError,
    EngineError,
    IdentityError,
    InvalidRequestError,
    MeshError,
    NoWorkerError,
    OtherWeightsError,
    OverloadedError,
    PeerLostError,
    StaleCardError,
    UnreachableError,
    WireError,
)
from kvmesh.protocol.hashing import plain_sequence_hash_bytes
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import (
    Delta,
    FinishReason,
    GenerateRequest,
    PullReport,
    ReleaseOffer,
    Role,
    SamplingParams,
    StopConditions,
    Ticket,
    TokenLogprob,
    pack_tokens,
)
from kvmesh.protocol.messages import decode as decoded
from tests.support.deltas import OneByOne, deltas_of
from tests.support.fake_mesh import FakeMesh, FakeWorker, Step, answer
from tests.support.patience import PATIENCE_S
from tests.support.recovery import RECOVERED_S

PROMPT = list(range(100, 140))
LOST = PeerLostError("the connection broke")
GONE = UnreachableError("connection refused")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "RETRY_S", 0.005)
    monkeypatch.setattr(dispatch, "LOST_AGAIN_S", 0.02)


def prefill(*scripts: list[Step], name: str = "p0", overlap_blocks: int = 0) -> FakeWorker:
    return FakeWorker(name, Role.PREFILL, *scripts, overlap_blocks=overlap_blocks)


def decode(*scripts: list[Step], name: str = "d0", overlap_blocks: int = 0) -> FakeWorker:
    return FakeWorker(name, Role.DECODE, *scripts, overlap_blocks=overlap_blocks)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


def request_of(max_tokens: int = 10) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r"),
        model="m",
        prompt=pack_tokens(PROMPT),
        sampling=SamplingParams(temperature=0),
        stop=StopConditions(max_tokens=max_tokens),
    )


class Waiting:
    """Implements kvmesh.frontend.presence.Presence: says of every worker that failed until when to wait for it."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self.started_again: dict[str, float] = {}  # by model
        self.asked: list[FailedWorker] = []

    def waits_until(self, failed: FailedWorker) -> float:
        self.asked.append(failed)
        return failed.at_s + self.wait_s

    def waits_for_model(self, model: str) -> float:
        return self.started_again.get(model, -math.inf)

    async def news(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


class Run:
    """Carries one request to a mesh of fakes."""

    def __init__(self, *workers: FakeWorker, wait_s: float = math.inf) -> None:
        self.mesh = FakeMesh(*workers)
        self.presence = Waiting(wait_s)
        self.dispatcher = Dispatcher(self.mesh, self.mesh, lambda model: 16, self.presence)  # type: ignore[arg-type]
        self.trace = Trace()
        self.traceparent = ""
        self.deltas: list[Delta] = []

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    async def __call__(self, max_tokens: int = 10, hints: Hints | None = None, timeout_s: float = PATIENCE_S) -> "Run":
        async with asyncio.timeout(PATIENCE_S), aclosing(self.generate(max_tokens, hints, timeout_s)) as deltas:
            async for delta in deltas:
                self.deltas.append(delta)
        return self

    def generate(
        self, max_tokens: int = 10, hints: Hints | None = None, timeout_s: float = PATIENCE_S
    ) -> AsyncIterator[Delta]:
        deadline = asyncio.get_running_loop().time() + timeout_s
        request = replace(request_of(max_tokens), traceparent=self.traceparent)
        return deltas_of(self.dispatcher, request, hints or Hints(), self.trace, deadline)

    async def check_nothing_is_left(self) -> None:
        """Bookings and calls have ended, every ticket was released exactly once."""
        await self.dispatcher.close()
        assert self.mesh.booked == set()
        assert self.mesh.open_calls == 0
        assert sorted(self.mesh.released, key=str) == sorted(self.mesh.offered, key=str)


@pytest_asyncio.fixture
async def checked() -> AsyncIterator[list[Run]]:
    """Runs that a test puts here are checked for leftovers at its end."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        await run.check_nothing_is_left()


# --- the plain ways -----------------------------------------------------------------------------------


async def test_one_worker_does_both_halves(checked: list[Run]) -> None:
    run = await Run(decode())()
    checked.append(run)
    assert run.tokens == answer(PROMPT, 10)
    assert run.deltas[-1].finish_reason is FinishReason.LENGTH
    assert (run.trace.prefill_worker, run.trace.decode_worker, run.trace.migrations) == (None, "d0", 0)
    assert run.trace.cached_tokens == 7


@pytest.mark.parametrize("script", [[9, Delta((5, 6, 7))], [Delta(tuple(range(30)))], [10, Delta((5,)), Delta((6,))]])
async def test_an_answer_ends_with_the_last_token_asked_for(checked: list[Run], script: list[Step]) -> None:
    """The worker sends more tokens than it may."""
    run = await Run(decode(script))(max_tokens=10)
    checked.append(run)
    assert len(run.tokens) == 10
    assert run.deltas[-1].finish_reason is FinishReason.LENGTH


def retokenizing(*script: Step) -> FakeWorker:
    return FakeWorker("d0", Role.AGGREGATED, script, retokenizes=True)


@pytest.mark.parametrize("last", [Delta((8, 9), FinishReason.LENGTH), Delta(finish_reason=FinishReason.STOP)])
async def test_text_of_a_server_is_not_cut_by_our_tokens(checked: list[Run], last: Delta) -> None:
    """A server's 10 tokens are 19 or more of ours."""
    run = await Run(retokenizing(9, Delta((5, 6, 7)), *[Delta((4,))] * 7, last))(max_tokens=10)
    checked.append(run)
    assert run.tokens == [*answer(PROMPT, 9), 5, 6, 7, *[4] * 7, *last.token_ids]
    assert run.deltas[-1].finish_reason is last.finish_reason


async def test_a_server_of_texts_that_never_ends_is_cut(checked: list[Run]) -> None:
    run = await Run(retokenizing(*[Delta(tuple(range(200)))] * 4))(max_tokens=2)
    checked.append(run)
    assert len(run.tokens) == 2 * dispatch.MAX_RETOKENIZED
    assert run.deltas[-1].finish_reason is FinishReason.LENGTH


async def test_a_worker_that_counts_ends_a_longer_text(checked: list[Run]) -> None:
    """The server is lost when its text has more tokens of ours than were asked for."""
    worker = FakeWorker("d1", Role.AGGREGATED, [Delta((1, 2))])
    run = await Run(retokenizing(9, Delta((5, 6, 7)), LOST), worker)(max_tokens=10)
    checked.append(run)
    assert run.tokens == [*answer(PROMPT, 9), 5, 6, 7]
    assert run.deltas[-1].finish_reason is FinishReason.LENGTH


async def test_after_a_ticket_alone_the_decode_worker_generates_all_tokens(
    checked: list[Run],
) -> None:
    ticket = Ticket(
        offer_id=1, worker_id=WorkerId("p0-id"), address="p0:1", backend="meets", nonce=1001, opaque=b"room 7"
    )
    p, d = prefill([Delta(ticket=ticket), asyncio.Event()]), decode()
    run = await Run(p, d)()
    checked.append(run)
    assert run.tokens == answer(PROMPT, 10)
    assert d.requests[0].generated == ()
    assert d.requests[0].ticket == ticket
    assert all(delta.token_ids for delta in run.deltas), "nobody is told of a token that is not there"
    assert (run.trace.prefill_worker, run.trace.decode_worker) == ("p0", "d0")


async def test_a_prefill_worker_hands_over_to_a_decode_worker(checked: list[Run]) -> None:
    pull = Delta((answer(PROMPT, 2)[1],), cached_tokens=3, pull=PullReport("fake", 640, 1, 0.1))
    p, d = prefill(), decode([pull, 10])
    run = await Run(p, d)()
    checked.append(run)
    assert run.tokens == answer(PROMPT, 10)
    assert p.requests[0].offer_kv
    assert d.requests[0].generated == (run.tokens[0],)
    assert d.requests[0].ticket is not None
    assert all(delta.ticket is None for delta in run.deltas), "a ticket is not for callers"
    assert (run.trace.prefill_worker, run.trace.decode_worker) == ("p0", "d0")
    assert (run.trace.transfer, run.trace.kv_bytes_pulled, run.trace.pull_error) == ("fake", 640, "")
    assert run.trace.cached_tokens == 7, "what prefill said counts"


async def test_an_answer_of_one_token_needs_no_decode_worker() -> None:
    p, d = prefill(), decode()
    run = await Run(p, d)(max_tokens=1)
    assert run.tokens == answer(PROMPT, 1)
    assert d.requests == []
    assert run.mesh.released == []


async def test_the_decode_workers_first_token_releases_the_offer() -> None:
    begin, go_on = asyncio.Event(), asyncio.Event()
    run = Run(prefill(), decode([begin, 1, go_on, 10]))
    async with aclosing(run.generate()) as deltas:
        await anext(deltas)
        assert run.mesh.released == []
        begin.set()
        await anext(deltas)
        await asyncio.sleep(0)
        assert run.mesh.released == run.mesh.offered
        go_on.set()
        assert len([delta async for delta in deltas]) == 8
    await run.check_nothing_is_left()


async def test_hints_reach_the_router() -> None:
    hints = Hints(False, "d0", "p7", 3, session="s", tenant="t", priority=-5, explain=True)
    [routed] = (await Run(decode())(hints=hints)).mesh.routed
    assert (routed.disaggregate, routed.pin, routed.pin_prefill, routed.pin_rank) == (False, "d0", "p7", 3)
    assert (routed.session, routed.tenant, routed.priority, routed.explain) == ("s", "t", -5, True)


@pytest.mark.parametrize("is_native", [True, False])
async def test_long_prompts_are_hashed_as_short_ones(monkeypatch: pytest.MonkeyPatch, is_native: bool) -> None:
    if not is_native:
        monkeypatch.setattr(route_requests, "sequence_hash_bytes", plain_sequence_hash_bytes)
    monkeypatch.setattr(route_requests, "SLOW_HASH_BYTES", 4 * len(PROMPT) - 1)
    [routed] = (await Run(decode())()).mesh.routed
    assert routed.sequence_hashes == plain_sequence_hash_bytes(pack_tokens(PROMPT), 16)


# --- what the router is told --------------------------------------------------------------------------


async def test_the_first_token_is_told_once_with_what_was_reused() -> None:
    assert (await Run(decode())()).mesh.reused == [7]


async def test_the_prefill_worker_reports_the_reused_tokens() -> None:
    pull = Delta((answer(PROMPT, 2)[1],), cached_tokens=3, pull=PullReport("fake", 640, 1, 0.1))
    run = await Run(prefill(), decode([pull, 10]))()
    assert run.mesh.reused == [7]


async def test_every_placement_of_a_migrated_answer_reports_its_first_token() -> None:
    run = await Run(decode([2, LOST], name="a"), decode([LOST], name="b"), decode(name="c"))()
    assert run.mesh.reused == [7, 7], "b has said nothing"


async def test_progress_is_told_as_long_as_the_request_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is reported before the first token as well: a booking of which nothing is heard ends, and the load would
    be forgotten."""
    monkeypatch.setattr(dispatch, "PROGRESS_S", 0.002)
    begin, go_on = asyncio.Event(), asyncio.Event()
    run = Run(decode([begin, 4, go_on, 10]))
    answering = asyncio.create_task(run())
    await until(lambda: len(run.mesh.progress) > 1)
    assert set(run.mesh.progress) == {0}
    begin.set()
    await until(lambda: run.mesh.progress[-1] == 4)
    go_on.set()
    await answering
    told = len(run.mesh.progress)
    await asyncio.sleep(0.01)
    assert len(run.mesh.progress) == told, "not after its end"


async def test_progress_counts_from_the_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that were generated before are part of the prompt that was placed."""
    monkeypatch.setattr(dispatch, "PROGRESS_S", 0.002)
    hold = asyncio.Event()
    run = Run(decode([6, LOST], name="a"), decode([3, hold, 10], name="b"))
    answering = asyncio.create_task(run())
    await until(lambda: len(run.tokens) == 9)
    run.mesh.progress.clear()
    await until(lambda: bool(run.mesh.progress))
    assert run.mesh.progress[-1] == 3
    hold.set()
    await answering


async def test_expected_overlap_is_that_of_the_worker_computing_the_prompt() -> None:
    whole = await Run(decode(overlap_blocks=1))()
    assert whole.trace.overlap_tokens == 16
    halves = await Run(prefill(overlap_blocks=2), decode(overlap_blocks=1))()
    assert halves.trace.overlap_tokens == 32
    moved = await Run(decode([3, LOST], name="a", overlap_blocks=1), decode(name="b", overlap_blocks=2))()
    assert moved.trace.overlap_tokens == 16, "as for cached tokens, the first worker counts"


async def test_the_wait_in_the_routers_queue_is_traced() -> None:
    run = Run(decode())
    run.mesh.has_room = asyncio.Event()
    answering = asyncio.create_task(run())
    await until(lambda: bool(run.mesh.routed))
    waited_from = asyncio.get_running_loop().time()
    await asyncio.sleep(0.01)
    run.mesh.has_room.set()
    least_s = asyncio.get_running_loop().time() - waited_from
    await answering
    assert run.trace.waited_s >= least_s


# --- explanations -------------------------------------------------------------------------------------


async def test_without_being_asked_nothing_is_explained() -> None:
    assert not (await Run(decode())()).trace.explanations


async def test_every_placement_of_a_migrated_answer_is_explained() -> None:
    run = await Run(decode([2, LOST], name="a"), decode(name="b"))(hints=Hints(explain=True))
    assert [e.why for e in run.trace.explanations] == ["a it is", "b it is"]
    assert run.trace.placed is not None
    assert run.trace.placed.decode.name == "b"


async def test_of_many_placements_the_last_are_explained() -> None:
    gone = [decode([UnreachableError("x")], name=f"d{i}") for i in range(12)]
    run = await Run(*gone, decode(name="alive"))(hints=Hints(explain=True))
    whys = [e.why for e in run.trace.explanations]
    assert (len(whys), whys[-1]) == (MAX_EXPLANATIONS, "alive it is")


async def test_a_preview_is_explained_and_touches_no_worker() -> None:
    run = Run(prefill(), decode())
    placed = await run.dispatcher.preview(
        request_of(), Hints(tenant="t"), asyncio.get_running_loop().time() + PATIENCE_S
    )
    assert (placed.decode.name, placed.prefill and placed.prefill.name) == ("d0", "p0")
    assert placed.explanation is not None
    [asked] = run.mesh.previewed
    assert (asked.tenant, asked.explain, asked.isl_tokens) == ("t", True, len(PROMPT))
    assert (run.mesh.routed, run.mesh.booked, run.mesh.open_calls) == ([], set(), 0)


# --- migration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure",
    [
        LOST,
        UnreachableError("x"),
        DrainingError("x"),
        EngineError("x"),
        CancelledByPeerError("x"),
        OverloadedError("x"),
    ],
    ids=lambda e: e.code,
)
@pytest.mark.parametrize("said", [0, 1, 5, 9])
async def test_what_one_worker_leaves_another_ends(checked: list[Run], failure: MeshError, said: int) -> None:
    a, b = decode([said, failure], name="a"), decode(name="b")
    run = await Run(a, b)()
    checked.append(run)
    assert run.tokens == answer(PROMPT, 10)
    assert b.requests[0].generated == tuple(run.tokens[:said])
    assert (run.trace.decode_worker, run.trace.migrations) == ("b", 1)
    assert run.mesh.routed[1].exclude == (WorkerId("a-id"),)
    assert run.mesh.routed[1].isl_tokens == len(PROMPT) + said


async def test_a_stream_that_ends_without_a_reason_goes_on_elsewhere(checked: list[Run]) -> None:
    run = await Run(decode([4], name="a"), decode(name="b"))()
    checked.append(run)
    assert run.tokens == answer(PROMPT, 10)
    assert run.trace.migrations == 1


async def test_each_worker_is_tried_once_and_in_the_routers_order(checked: list[Run]) -> None:
    workers = [decode([2, LOST], name=name) for name in "abc"]
    run = await Run(*workers, decode(name="d"))()
    checked.append(run)
    assert run.tokens == answer(PROMPT, 10)
    assert [len(w.requests) for w in workers] == [1, 1, 1]
    assert [r.exclude for r in run.mesh.routed][-1] == ("a-id", "b-id", "c-id")
    assert run.trace.migrations == 3


async def test_four_failed_workers_end_a_request_with_the_last_error(checked: list[Run]) -> None:
    run = Run(*[decode([1, PeerLostError(f"lost {name}")], name=name) for name in "abcde"])
    checked.append(run)
    with pytest.raises(PeerLostError, match="4 workers were lost"):
        await run()
    assert run.tokens == answer(PROMPT, 4), "what was sent is right as far as it goes"


async def test_a_request_that_breaks_engines_breaks_two_at_most(checked: list[Run]) -> None:
    workers = [decode([1, EngineError(f"of {name}")], name=name) for name in "abc"]
    run = Run(*workers)
    checked.append(run)
    with pytest.raises(EngineError, match="of b"):
        await run()
    assert [len(w.requests) for w in workers] == [1, 1, 0]


async def test_engines_that_break_are_counted_over_all_attempts() -> None:
    p = prefill([EngineError("of p")])
    a, b, c = decode([1, LOST], name="a"), decode([1, EngineError("of b")], name="b"), decode(name="c")
    run = Run(p, a, b, c)
    with pytest.raises(EngineError, match="of b"):
        await run()
    assert (c.requests, run.mesh.booked, run.mesh.open_calls) == ([], set(), 0)


# --- a request that ends workers ----------------------------------------------------------------------


def dying(name: str, *scripts: list[Step]) -> FakeWorker:
    worker = decode(*(scripts or ([LOST],)), name=name)
    worker.lives = False
    return worker


async def test_a_request_ends_two_processes_at_most(checked: list[Run]) -> None:
    workers = [dying(name) for name in "abc"]
    run = Run(*workers)
    checked.append(run)
    with pytest.raises(EngineError, match="processes of 2 workers ended"):
        await run()
    assert [len(w.requests) for w in workers] == [1, 1, 0]


async def test_repeating_a_request_that_ended_workers_reaches_none(checked: list[Run]) -> None:
    workers = [dying(name) for name in "abc"]
    run = Run(*workers)
    checked.append(run)
    with pytest.raises(EngineError):
        await run()
    with pytest.raises(EngineError, match="the same request") as error:
        await run()
    assert error.value.retry_after_s is not None
    assert [len(w.requests) for w in workers] == [1, 1, 0]
    with pytest.raises(EngineError, match="ended while"):
        await run(max_tokens=11)


async def test_lost_connections_to_living_workers_get_all_tries(checked: list[Run]) -> None:
    run = await Run(*[decode([LOST], name=name) for name in "abc"], decode(name="d"))()
    checked.append(run)
    assert run.tokens == answer(PROMPT, 10)


async def test_a_worker_that_gave_tokens_was_not_ended_by_the_request(checked: list[Run]) -> None:
    run = await Run(*[dying(name, [2, LOST]) for name in "abc"], decode(name="d"))()
    checked.append(run)
    assert run.tokens == answer(PROMPT, 10)


async def test_a_prefill_worker_that_ends_is_counted() -> None:
    p = prefill([LOST], [LOST])
    p.lives = False
    run = Run(p, dying("a"), decode(name="b"))
    with pytest.raises(EngineError, match="processes of 2 workers ended"):
        await run()


# --- further failures ---------------------------------------------------------------------------------


async def test_after_a_failed_decode_leg_the_answer_is_prefilled_too(checked: list[Run]) -> None:
    p, a, b = prefill(), decode([3, LOST], name="a"), decode(name="b")
    run = await Run(p, a, b)()
    checked.append(run)
    assert run.tokens == answer(PROMPT, 10)
    assert [request.generated for request in p.requests] == [(), tuple(run.tokens[:4])]
    assert b.requests[0].generated == tuple(run.tokens[:5])
    assert len(run.mesh.offered) == 2


async def test_a_decode_worker_dying_at_once_leaks_no_offer(checked: list[Run]) -> None:
    run = await Run(prefill(), decode([LOST], name="a"), decode(name="b"))()
    checked.append(run)
    assert run.tokens == answer(PROMPT, 10)


@pytest.mark.parametrize("script", [[LOST], [], [DrainingError("x")]], ids=["lost", "ended", "draining"])
async def test_without_its_prefill_worker_the_decode_worker_does_both(checked: list[Run], script: list[Step]) -> None:
    p, d = prefill(script), decode()
    run = await Run(p, d)()
    assert run.mesh.released == []
    assert run.tokens == answer(PROMPT, 10)
    assert d.requests[0].generated == ()
    assert d.requests[0].ticket is None
    assert (run.trace.prefill_worker, run.trace.decode_worker) == (None, "d0"), "p0 has prefilled nothing"


async def test_workers_that_cannot_be_reached_are_no_attempts(checked: list[Run]) -> None:
    """A node that dies takes many with it, and their cards stand until the leases have passed."""
    gone = UnreachableError("connection refused")
    prefillers = [prefill([gone], name=f"p{i}") for i in range(6)]
    decoders = [decode([gone], name=f"d{i}") for i in range(6)]
    run = await Run(*prefillers, *decoders, decode(name="alive"))()
    assert run.tokens == answer(PROMPT, 10)
    assert run.trace.decode_worker == "alive"
    assert run.trace.cached_tokens == 7, "those of the one that computed the prompt"


async def test_a_migrated_answer_keeps_the_first_workers_cached_tokens() -> None:
    run = await Run(decode([Delta(tuple(answer(PROMPT, 1)), cached_tokens=3), LOST], name="a"), decode(name="b"))()
    assert run.trace.cached_tokens == 3


@pytest.mark.parametrize(
    "failure", [InvalidRequestError("x"), DeadlineExceededError("x"), WireError("x"), MeshError("x")],
    ids=lambda e: e.code,
)  # fmt: skip
@pytest.mark.parametrize("with_prefill", [False, True])
async def test_what_would_fail_everywhere_is_not_tried_elsewhere(failure: MeshError, with_prefill: bool) -> None:
    first = prefill([failure]) if with_prefill else decode([failure], name="a")
    other = decode(name="b")
    run = Run(first, other)
    with pytest.raises(type(failure)):
        await run()
    assert other.requests == []
    assert (run.mesh.booked, run.mesh.open_calls) == (set(), 0)


# --- patience -----------------------------------------------------------------------------------------


async def test_without_any_worker_a_new_request_is_refused_at_once() -> None:
    run = Run(prefill())
    with pytest.raises(NoWorkerError):
        await run()
    assert len(run.mesh.routed) == 1


async def test_a_new_request_with_a_pin_does_not_wait_for_other_workers() -> None:
    run = Run()
    run.presence.started_again["m"] = math.inf
    with pytest.raises(NoWorkerError):
        await run(hints=Hints(pin="b"))
    assert len(run.mesh.routed) == 1


async def test_a_new_request_waits_for_a_worker_that_is_started_again(checked: list[Run]) -> None:
    run = Run()
    checked.append(run)
    run.presence.started_again["m"] = math.inf
    answering = asyncio.create_task(run())
    await until(lambda: len(run.mesh.routed) >= 3)
    run.mesh.workers.append(decode(name="b"))
    await answering
    assert run.tokens == answer(PROMPT, 10)
    assert run.trace.migrations == 0


async def test_a_new_request_stops_waiting_when_the_worker_is_given_up(checked: list[Run]) -> None:
    run = Run()
    checked.append(run)
    run.presence.started_again["m"] = math.inf
    answering = asyncio.create_task(run())
    await until(lambda: len(run.mesh.routed) >= 3)
    run.presence.started_again.clear()
    with pytest.raises(NoWorkerError):
        await answering


async def test_a_new_request_waits_no_longer_than_its_deadline(checked: list[Run]) -> None:
    run = Run()
    checked.append(run)
    run.presence.started_again["m"] = math.inf
    with pytest.raises(DeadlineExceededError, match="no worker of the model 'm' came back in time"):
        await run(timeout_s=0.1)


async def test_a_request_without_workers_left_waits_for_a_replacement(checked: list[Run]) -> None:
    run = Run(decode([3, LOST], name="a"))
    checked.append(run)
    answering = asyncio.create_task(run())
    await until(lambda: len(run.mesh.routed) >= 4)
    run.mesh.workers.append(decode(name="b"))
    await answering
    assert run.tokens == answer(PROMPT, 10)
    assert run.trace.migrations == 1, "waiting is no migration"


async def test_a_lost_worker_that_returns_continues_the_answer(checked: list[Run]) -> None:
    """Only the network was away: there is no other worker, and this one still has its prefix."""
    lost = decode([3, LOST], [GONE], [GONE], [10**6], name="a")
    run = await Run(lost)()
    checked.append(run)
    assert run.tokens == answer(PROMPT, 10)
    assert (len(lost.requests), run.trace.migrations) == (4, 1)


async def test_lost_workers_are_tried_once_per_pause(checked: list[Run]) -> None:
    """Each try has the prompt computed by a prefill worker: hundreds of waiting requests must not flood it."""
    p = prefill()
    run = Run(p, decode([GONE]))
    checked.append(run)
    with pytest.raises((NoWorkerError, DeadlineExceededError)):
        await run(max_tokens=100, timeout_s=0.6)
    assert 2 <= len(p.requests) <= 0.6 / 0.02 + 2


async def test_a_worker_whose_engine_failed_is_not_tried_again(checked: list[Run]) -> None:
    broken = decode([3, EngineError("boom")], name="a")
    run = Run(broken, wait_s=0.1)
    checked.append(run)
    with pytest.raises(EngineError, match="boom"):
        await run()
    assert len(broken.requests) == 1


async def test_a_request_fails_at_once_if_no_worker_comes_back(checked: list[Run]) -> None:
    run = Run(decode([3, LOST]), wait_s=-math.inf)
    checked.append(run)
    with pytest.raises(NoWorkerError) as failed:
        await run()
    assert str(failed.value) == (
        "the worker of this request is gone, and no other one of the model 'm' is ready; "
        "try again later; GET /health says why"
    )
    assert (run.tokens, len(run.mesh.routed)) == (answer(PROMPT, 3), 2)


def unreachable(cause: Exception) -> UnreachableError:
    error = UnreachableError("cannot connect to 10.0.0.7:44603")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (
            IdentityError("cannot connect to 10.0.0.7:44603: this process's certificate has expired"),
            "this frontend cannot connect to a worker of the model 'm': a certificate has expired, or is refused",
        ),
        (unreachable(TimeoutError()), "the worker of this request cannot be reached, and no other one"),
        (unreachable(ConnectionRefusedError()), "the worker of this request is gone, and no other one"),
    ],
)
async def test_a_client_learns_why_no_worker_answers(
    problem: MeshError, words: str, checked: list[Run], caplog: pytest.LogCaptureFixture
) -> None:
    checked.append(run := Run(decode([problem]), wait_s=-math.inf))
    with pytest.raises(NoWorkerError, match=words) as failed:
        await run()
    assert "10.0.0.7" not in str(failed.value)
    assert str(problem) in caplog.text, "the operator's log has the detail"


async def test_a_client_is_told_no_address(checked: list[Run]) -> None:
    for lost in (PeerLostError("lost 10.0.0.7:44603: it broke"), UnreachableError("cannot connect to 10.0.0.7:44603")):
        run = Run(*(decode([lost], name=f"d{number}") for number in range(5)), wait_s=-math.inf)
        checked.append(run)
        with pytest.raises(MeshError) as failed:
            await run()
        assert "10.0.0.7" not in str(failed.value)


async def test_a_worker_that_rests_is_not_waited_for(checked: list[Run]) -> None:
    run = Run(decode([DrainingError("this worker is asleep")]), wait_s=-math.inf)
    checked.append(run)
    with pytest.raises(NoWorkerError, match="takes no more requests, and no other one"):
        await run()


async def test_a_wait_ends_with_what_the_mesh_says(checked: list[Run]) -> None:
    run = Run(decode([3, LOST], [GONE]), wait_s=0.2)
    checked.append(run)
    started = asyncio.get_running_loop().time()
    answering = asyncio.create_task(run())
    await until(lambda: len(run.presence.asked) >= 3)
    run.presence.wait_s = -math.inf
    with pytest.raises(NoWorkerError):
        await answering
    assert asyncio.get_running_loop().time() - started < RECOVERED_S
    assert run.tokens == answer(PROMPT, 3)


async def test_a_wait_ends_with_the_deadline(checked: list[Run]) -> None:
    run = Run(decode([3, LOST], [GONE]))
    checked.append(run)
    started = asyncio.get_running_loop().time()
    with pytest.raises((PeerLostError, DeadlineExceededError)):
        await run(timeout_s=0.02)
    assert asyncio.get_running_loop().time() - started < RECOVERED_S


async def test_a_migrating_request_waits_for_the_router(checked: list[Run]) -> None:
    go_on = asyncio.Event()
    a = decode([3, go_on, LOST], name="a")
    run = Run(a, decode(name="b"))
    checked.append(run)
    answering = asyncio.create_task(run())
    await a.reached.wait()
    run.mesh.route_problem = NoWorkerError("no router is ready")
    go_on.set()
    await until(lambda: len(run.mesh.routed) >= 4)
    run.mesh.route_problem = None
    await answering
    assert run.tokens == answer(PROMPT, 10)


async def test_overload_of_the_only_worker_is_said_at_once() -> None:
    run = Run(decode([OverloadedError("4096 requests wait")]))
    with pytest.raises(OverloadedError):
        await run()
    assert len(run.mesh.routed) == 2, "no retries: the caller is told when to come back"


async def test_a_full_queue_refuses_at_once_with_retry_after() -> None:
    run = Run(decode())
    run.mesh.route_problem = OverloadedError("the queue is full", retry_after_s=7)
    with pytest.raises(OverloadedError) as refused:
        await run()
    assert refused.value.retry_after_s == 7
    assert len(run.mesh.routed) == 1


async def test_a_full_queue_ends_a_request_with_an_unreachable_worker() -> None:
    """The caller may as well come back, because nothing was begun."""
    go_on = asyncio.Event()
    a = decode([go_on, UnreachableError("x")], name="a")
    run = Run(a, decode(name="b"))
    answering = asyncio.create_task(run())
    await a.reached.wait()
    run.mesh.route_problem = OverloadedError("the queue is full", retry_after_s=7)
    go_on.set()
    with pytest.raises(OverloadedError, match="queue"):
        await answering


async def test_a_full_queue_does_not_end_a_begun_answer(checked: list[Run]) -> None:
    go_on = asyncio.Event()
    a = decode([3, go_on, LOST], name="a")
    run = Run(a, decode(name="b"))
    checked.append(run)
    answering = asyncio.create_task(run())
    await a.reached.wait()
    run.mesh.route_problem = OverloadedError("the queue is full", retry_after_s=7)
    go_on.set()
    await until(lambda: len(run.mesh.routed) >= 4)
    run.mesh.route_problem = None
    await answering
    assert run.tokens == answer(PROMPT, 10)


async def test_overload_everywhere_is_said_at_once() -> None:
    run = Run(*[decode([OverloadedError("full")], name=name) for name in "ab"])
    with pytest.raises(OverloadedError):
        await run()


# --- giving up ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", range(6))
async def test_closing_after_any_token_frees_everything(checked: list[Run], taken: int) -> None:
    p, d = prefill(), decode()
    run = Run(p, d)
    checked.append(run)
    deltas = run.generate()
    for _ in range(taken):
        await anext(deltas)
    await deltas.aclose()
    assert (run.mesh.booked, run.mesh.open_calls) == (set(), 0)
    assert d.cancelled == (taken > 0), "the decode worker is asked as soon as there is a ticket"


async def cancelled_while(run: Run, worker: FakeWorker) -> None:
    answering = asyncio.create_task(run())
    async with asyncio.timeout(PATIENCE_S):
        await worker.reached.wait()
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert worker.cancelled == 1
    assert (run.mesh.booked, run.mesh.open_calls) == (set(), 0)


async def test_a_client_may_leave_while_its_request_is_queued() -> None:
    d = decode()
    run = Run(d)
    run.mesh.has_room = asyncio.Event()
    answering = asyncio.create_task(run())
    await until(lambda: bool(run.mesh.routed))
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert (run.mesh.booked, d.requests) == (set(), [])


async def test_a_client_that_leaves_during_prefill() -> None:
    p = prefill([asyncio.Event()])
    run = Run(p, decode())
    await cancelled_while(run, p)
    assert run.mesh.released == []


async def test_a_ticket_that_arrives_after_its_client_has_left_is_released() -> None:
    p, released, reached = prefill(), asyncio.Queue[ReleaseOffer](), asyncio.Event()

    async def generate(call: Call) -> None:
        """Send the ticket when the caller leaves: the ticket and the cancellation cross on the wire."""
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            ticket = replace(p.ticket(decoded(call.body, GenerateRequest)), offer_id=7, address=server.address)
            await call.send(Delta((1,), ticket=ticket))

    async def release(call: Call) -> None:
        released.put_nowait(decoded(call.body, ReleaseOffer))

    server, plane = PlaneServer({"generate": generate, "release": release}), PlaneClient()
    p.target = replace(p.target, address=await server.start("127.0.0.1"))
    run = Run(p, decode())
    run.dispatcher = Dispatcher(run.mesh, plane, lambda model: 16)  # type: ignore[arg-type]
    answering = asyncio.create_task(run())
    async with asyncio.timeout(PATIENCE_S):
        await reached.wait()
        answering.cancel()
        assert (await released.get()).offer_id == 7
    await run.dispatcher.close()
    await plane.close()
    await server.close()


async def test_a_client_may_leave_before_the_decode_workers_first_token(checked: list[Run]) -> None:
    d = decode([asyncio.Event()])
    run = Run(prefill(), d)
    checked.append(run)
    await cancelled_while(run, d)


async def test_a_client_that_leaves_in_mid_stream(checked: list[Run]) -> None:
    d = decode([4, asyncio.Event()])
    run = Run(prefill(), d)
    checked.append(run)
    await cancelled_while(run, d)


async def test_a_client_that_leaves_while_a_replacement_is_waited_for(checked: list[Run]) -> None:
    run = Run(decode([3, LOST]))
    checked.append(run)
    answering = asyncio.create_task(run())
    await until(lambda: len(run.mesh.routed) >= 3)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering


async def test_a_failed_release_harms_no_answer() -> None:
    run = Run(prefill(), decode())
    run.mesh.release_fails = LOST
    await run()
    await run.dispatcher.close()
    assert run.tokens == answer(PROMPT, 10)
    assert len(run.mesh.released) == 1


async def test_without_time_left_nothing_is_sent() -> None:
    d = decode()
    run = Run(d)
    with pytest.raises(DeadlineExceededError):
        await run(timeout_s=-1)
    assert d.requests == []


# --- logprobs of the prompt ---------------------------------------------------------------------------

SCORES = tuple(TokenLogprob(token, -float(n)) for n, token in enumerate(PROMPT[1:]))
FIRST, SECOND = Delta(logprobs=SCORES[:10]), Delta(logprobs=SCORES[10:])


class Scorer(OneByOne):
    """Takes every delta at once, and the logprobs of the prompt."""

    is_full = False

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[TokenLogprob] = []
        self.tokens: list[int] = []
        self.is_done = False

    def take(self, delta: Delta) -> bool:
        assert len(delta.logprobs or ()) in (0, len(delta.token_ids))
        self.tokens += delta.token_ids
        self.is_done = delta.finish_reason is not None
        return not self.is_done

    def take_prompt_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        assert not self.tokens, "they come before the answer"
        self.logprobs += logprobs


async def score(run: Run) -> Scorer:
    consumer, request = Scorer(), request_of()
    sampling = replace(request.sampling, prompt_logprobs=0, top_logprobs=0)
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    await run.dispatcher.generate(replace(request, sampling=sampling), Hints(), run.trace, deadline, consumer)
    return consumer


def wanted(worker: FakeWorker) -> list[int | None]:
    """Return the logprobs of the prompt that each request to the worker asked for."""
    return [request.sampling.prompt_logprobs for request in worker.requests]


async def test_logprobs_of_the_prompt_come_before_the_answer(checked: list[Run]) -> None:
    checked.append(run := Run(d := decode([FIRST, SECOND, 10])))
    taken = await score(run)
    assert taken.logprobs == list(SCORES)
    assert taken.tokens == answer(PROMPT, 10)
    assert (wanted(d), run.mesh.reused) == ([0], [7]), "the first token, not the first logprob, ends the prefill"


async def test_logprobs_of_the_prompt_may_come_with_the_first_token(checked: list[Run]) -> None:
    token = answer(PROMPT, 1)[0]
    together = Delta((token,), logprobs=(*SCORES[10:], TokenLogprob(token, -0.5)))
    checked.append(run := Run(decode([FIRST, together, 10])))
    taken = await score(run)
    assert taken.logprobs == list(SCORES)
    assert taken.tokens == answer(PROMPT, 10)


async def test_the_prefill_leg_gives_the_logprobs_of_the_prompt(checked: list[Run]) -> None:
    checked.append(run := Run(p := prefill([FIRST, SECOND, 1]), d := decode()))
    taken = await score(run)
    assert taken.logprobs == list(SCORES)
    assert taken.tokens == answer(PROMPT, 10)
    assert (wanted(p), wanted(d)) == ([0], [None])


async def test_no_cached_prefix_counts_for_a_prompt_with_logprobs(checked: list[Run]) -> None:
    checked.append(run := Run(decode([FIRST, SECOND, LOST], [10], name="a"), decode(name="b")))
    await score(run)
    checked.append(plain := await Run(decode())())
    [routed] = run.mesh.routed[:1]
    assert len(routed.sequence_hashes) == len(plain.mesh.routed[0].sequence_hashes)
    assert routed.sequence_hashes != plain.mesh.routed[0].sequence_hashes
    assert routed.isl_tokens == len(PROMPT)


@pytest.mark.parametrize("before", [[], [FIRST], [FIRST, SECOND], [FIRST, SECOND, 3]], ids=len)
async def test_a_scored_prompt_migrates_without_a_logprob_lost_or_twice(checked: list[Run], before: list[Step]) -> None:
    all_at_once = Delta(logprobs=SCORES)
    has_all = len(before) > 1
    a, b = decode([*before, LOST], name="a"), decode([10] if has_all else [all_at_once, 10], name="b")
    checked.append(run := Run(a, b))
    taken = await score(run)
    assert taken.logprobs == list(SCORES)
    assert taken.tokens == answer(PROMPT, 10)
    assert wanted(b) == [None if has_all else 0]


async def test_a_ticket_alone_may_bring_the_logprobs_of_the_prompt(checked: list[Run]) -> None:
    ticket = Ticket(
        offer_id=1, worker_id=WorkerId("p0-id"), address="p0:1", backend="meets", nonce=1001, opaque=b"room 7"
    )
    checked.append(run := Run(prefill([Delta(ticket=ticket, logprobs=SCORES)]), d := decode()))
    taken = await score(run)
    assert (taken.logprobs, taken.tokens) == (list(SCORES), answer(PROMPT, 10))
    assert wanted(d) == [None]


async def test_a_ticket_without_the_logprobs_leaves_them_to_the_decode_worker(checked: list[Run]) -> None:
    ticket = Ticket(
        offer_id=1, worker_id=WorkerId("p0-id"), address="p0:1", backend="meets", nonce=1001, opaque=b"room 7"
    )
    checked.append(run := Run(prefill([Delta(ticket=ticket)]), d := decode([Delta(logprobs=SCORES), 10])))
    taken = await score(run)
    assert (taken.logprobs, taken.tokens) == (list(SCORES), answer(PROMPT, 10))
    assert wanted(d) == [0]


# --- weights ------------------------------------------------------------------------------------------


def with_weights(content: str, *scripts: list[Step], name: str = "d0", role: Role = Role.DECODE) -> FakeWorker:
    return FakeWorker(name, role, *scripts, content=content)


async def test_each_worker_is_told_the_weights_that_its_card_had(checked: list[Run]) -> None:
    p, d = with_weights("x", name="p0", role=Role.PREFILL), with_weights("x")
    checked.append(run := await Run(p, d)())
    assert ([r.content for r in p.requests], [r.content for r in d.requests]) == (["x"], ["x"])
    assert [asked.content for asked in run.mesh.routed] == [""], "a new request may have any weights"


async def test_an_answer_goes_on_with_the_weights_that_it_began_with(checked: list[Run]) -> None:
    other, same = with_weights("y", name="b"), with_weights("x", name="c")
    checked.append(run := await Run(with_weights("x", [4, LOST]), other, same)())
    assert run.tokens == answer(PROMPT, 10)
    assert (len(other.requests), len(same.requests)) == (0, 1)


async def test_an_answer_that_only_other_weights_could_end_fails(checked: list[Run]) -> None:
    other = with_weights("y", name="b")
    checked.append(run := Run(with_weights("x", [4, LOST]), other, wait_s=-math.inf))
    with pytest.raises(OtherWeightsError):
        await run()
    assert (run.tokens, other.requests) == (answer(PROMPT, 4), [])


async def test_an_answer_without_a_token_may_have_any_weights(checked: list[Run]) -> None:
    checked.append(run := await Run(with_weights("x", [LOST]), with_weights("y", name="b"))())
    assert run.tokens == answer(PROMPT, 10)


async def test_a_first_token_of_a_prefill_worker_binds_the_rest(checked: list[Run]) -> None:
    p, d = with_weights("x", name="p0", role=Role.PREFILL), with_weights("x", [LOST])
    checked.append(run := Run(p, d, with_weights("y", name="b"), wait_s=-math.inf))
    with pytest.raises(OtherWeightsError):
        await run()
    assert run.tokens == answer(PROMPT, 1)


async def test_a_worker_with_a_stale_card_is_asked_again(checked: list[Run]) -> None:
    """It has refused: its new card is on its way, and there is no other worker."""
    woken = with_weights("x", [StaleCardError("other weights")], [10**6])
    checked.append(run := await Run(woken, wait_s=PATIENCE_S)())
    assert run.tokens == answer(PROMPT, 10)
    assert len(woken.requests) == 2


# --- what admission is told ---------------------------------------------------------------------------


async def test_the_router_is_told_how_many_tokens_may_come(checked: list[Run]) -> None:
    run = await Run(decode([4, LOST], name="a"), decode(name="b"))(max_tokens=10)
    checked.append(run)
    assert [(asked.max_tokens, asked.is_continued) for asked in run.mesh.routed] == [(10, False), (6, True)]


async def test_a_whole_answer_reports_its_length_and_a_broken_one_its_progress() -> None:
    run = await Run(decode([4, LOST], name="a"), decode(name="b"))(max_tokens=10)
    assert run.mesh.finished == [6]
    assert run.mesh.progress[-1] == 4
