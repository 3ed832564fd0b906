"""A run of decode steps taken at once comes to the same as its steps taken one by one."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.pool import BlockPool
from kvmesh.protocol.events import KvEvent
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import (
    FinishReason,
    GenerateRequest,
    KvLayout,
    SamplingParams,
    StopConditions,
    Ticket,
    pack_tokens,
)
from kvmesh.workers.engines.mock.executor import mock_token
from kvmesh.workers.executor import Sampled
from kvmesh.workers.scheduler import DecodeRun, KvPull, Limits, Output, Scheduler, SequenceState
from tests.support.budget import examples

BLOCK = 4
VOCABULARY = 1000


def next_token(sequence: SequenceState) -> int:
    return mock_token(list(sequence.prompt), len(sequence.output), VOCABULARY)


def draw(sequence: SequenceState, count: int) -> tuple[int, ...]:
    first = len(sequence.output)
    return tuple(mock_token(list(sequence.prompt), first + i, VOCABULARY) for i in range(count))


@dataclass
class Told:
    """Merges all deltas of each request."""

    token_ids: list[int] = field(default_factory=list)
    reasons: list[FinishReason] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)


class Engine:
    """A scheduler, and what it has told. With `runs` it takes runs where it can."""

    def __init__(self, limits: Limits, num_blocks: int, *, runs: bool) -> None:
        self.scheduler = Scheduler(BlockPool(num_blocks, BLOCK), limits, [2])
        self.runs = runs
        self.num_runs = 0
        self.steps = 0
        self.told: dict[str, Told] = {}
        self.events: list[KvEvent] = []
        self.pulls: list[tuple[int, KvPull]] = []  # the step before which it ends
        self.held: list[int] = []  # entries of the block tables of each step's rows

    def advance(self, until: int, rng: random.Random) -> None:
        """Up to step `until`, as long as there is anything to do."""
        while self.steps < until:
            self._end_pulls()
            if self.runs and (run := self.scheduler.plan_run()) is not None:
                self._take(run, min(run.steps, until - self.steps, rng.randint(1, 9), self._until_pull()))
                continue
            step = self.scheduler.plan()
            self.pulls += [(self.steps + 3 + pull.skip, pull) for pull in step.pulls]
            self.held.append(sum(len(row.block_table) for row in step.rows))
            results = [
                Sampled(next_token(sequence)) if row.sample else None
                for row, sequence in zip(step.rows, step.sequences, strict=True)
            ]
            self._tell(self.scheduler.complete(step, results))
            self.steps += 1

    def _take(self, run: DecodeRun, steps: int) -> None:
        self.num_runs += 1
        self.held += [run.blocks_at(step) for step in range(steps)]
        self._tell(self.scheduler.complete_run(run, steps, draw))
        self.steps += steps

    def _until_pull(self) -> int:
        return min((ends - self.steps for ends, _ in self.pulls), default=1 << 30)

    def _end_pulls(self) -> None:
        for due in [each for each in self.pulls if each[0] <= self.steps]:
            self.pulls.remove(due)
            self.scheduler.pull_ended(due[1].sequence, arrived=True)

    def _tell(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            told = self.told.setdefault(output.request_id, Told())
            told.token_ids += output.delta.token_ids
            if output.delta.finish_reason is not None:
                told.reasons.append(output.delta.finish_reason)
            if output.delta.cached_tokens is not None:
                told.cached_tokens.append(output.delta.cached_tokens)
            if output.handoff:
                self.scheduler.pool.release(output.handoff)
        self.events += self.scheduler.pool.take_events()

    def content(self) -> dict[int, tuple[object, ...]]:
        """Return the holders of every block of the pool, and the blocks in the order of their eviction."""
        pool = self.scheduler.pool
        return {
            number: (block.refs, block.hash, block.parent, block.children, block.last_used, tuple(block.tokens))
            for number, block in enumerate(pool._blocks)
        }


def flat(events: Sequence[KvEvent]) -> list[tuple[str, int]]:
    """Events in order, a block at a time: how they are packed may differ."""
    return [(type(event).__name__, name) for event in events for name in getattr(event, "hashes", (0,))]


def request(name: str, prompt: Sequence[int], max_tokens: int, **fields: object) -> GenerateRequest:
    stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(request_id=RequestId(name), model="m", prompt=pack_tokens(prompt), stop=stop, **fields)  # type: ignore[arg-type]


def ticket(num_tokens: int) -> Ticket:
    return Ticket(
        offer_id=1,
        worker_id=WorkerId("p"),
        address="",
        backend="shm",
        nonce=1,
        layout=KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK, dtype="float32"),
        block_ids=tuple(range(-(-num_tokens // BLOCK))),
        num_tokens=num_tokens,
    )


arrivals = st.lists(
    st.tuples(
        st.integers(0, 60),  # before which step
        st.integers(1, 30),  # prompt tokens
        st.integers(0, 2),  # of which text the prompt is a part
        st.integers(1, 40),  # answer
        st.sampled_from(["plain", "plain", "plain", "offer", "pull", "stops"]),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=examples(300))
@given(
    arrivals,
    st.integers(18, 60),
    st.integers(1, 6),
    st.integers(2, 24),
    st.integers(40, 90),
    st.integers(0, 1 << 16),
)
def test_runs_change_nothing(
    given_arrivals: list[tuple[int, int, int, int, str]],
    num_blocks: int,
    max_num_seqs: int,
    max_step_tokens: int,
    context: int,
    seed: int,
) -> None:
    limits = Limits(max_num_seqs, max_step_tokens, context, VOCABULARY)
    one_by_one, at_once = (Engine(limits, num_blocks, runs=runs) for runs in (False, True))
    todo = [*sorted(enumerate(given_arrivals), key=lambda each: each[1][0]), (-1, (400, 1, 0, 1, "end"))]
    rng = random.Random(seed)
    for number, (step, isl, text, osl, kind) in todo:
        for engine in (one_by_one, at_once):
            engine.advance(step, rng)
            assert engine.scheduler.queued_tokens >= 0
            if kind == "end":
                continue
            prompt = [10 + text * 100 + i for i in range(isl)]
            fields: dict[str, object] = {"offer_kv": kind == "offer"}
            if kind == "pull" and osl > 1:
                fields |= {"generated": (mock_token(prompt, 0, VOCABULARY),), "ticket": ticket(isl)}
            asked = request(str(number), prompt, osl, **fields)
            if kind == "stops":
                asked = GenerateRequest(
                    request_id=asked.request_id, model="m", prompt=asked.prompt, stop=StopConditions(max_tokens=osl)
                )
            engine.scheduler.add(asked)
        assert at_once.told == one_by_one.told
        assert flat(at_once.events) == flat(one_by_one.events)
        assert at_once.content() == one_by_one.content()
        assert at_once.scheduler.pool.digest == one_by_one.scheduler.pool.digest
        assert at_once.held == one_by_one.held, "steps would take another time"
        assert at_once.scheduler.num_preempted == one_by_one.scheduler.num_preempted


def engine_with(*requests: GenerateRequest, num_blocks: int = 64, **limits: int) -> Scheduler:
    values = {"max_num_seqs": 8, "max_step_tokens": 64, "context_tokens": 256, "vocab_size": VOCABULARY} | limits
    scheduler = Scheduler(BlockPool(num_blocks, BLOCK), Limits(**values), [2])
    for each in requests:
        scheduler.add(each)
    step = scheduler.plan()
    scheduler.complete(step, [Sampled(9) if row.sample else None for row in step.rows])
    return scheduler


def test_a_run_ends_one_step_before_the_first_answer() -> None:
    scheduler = engine_with(request("a", [5], 12), request("b", [6], 30))
    run = scheduler.plan_run()
    assert run is not None
    assert run.steps == 10, "12 tokens: one with the prompt, ten in the run, and the last by itself"


def test_a_run_says_how_many_blocks_its_steps_read() -> None:
    scheduler = engine_with(request("a", [5, 6, 7], 12))
    run = scheduler.plan_run()
    assert run is not None
    assert [run.blocks_at(step) for step in range(run.steps)] == [1] + [2] * 4 + [3] * 4 + [4]


def test_a_run_ends_before_blocks_run_out() -> None:
    scheduler = engine_with(request("a", [5], 30), request("b", [6], 30), num_blocks=10)
    run = scheduler.plan_run()
    assert run is not None
    assert run.steps == 19, "5 blocks each: 20 tokens, the prompt among them"


@pytest.mark.parametrize(
    "asked",
    [
        request("a", [5], 9, sampling=SamplingParams(top_logprobs=1)),
        GenerateRequest(request_id=RequestId("a"), model="m", prompt=pack_tokens([5])),
    ],
    ids=["logprobs", "may stop"],
)
def test_sequences_with_rules_are_computed_step_by_step(asked: GenerateRequest) -> None:
    assert engine_with(asked).plan_run() is None


def test_there_is_no_run_while_somebody_could_be_admitted() -> None:
    scheduler = engine_with(request("a", [5], 20))
    scheduler.add(request("b", [6], 20))
    assert scheduler.plan_run() is None
    full = engine_with(request("a", [5], 20), max_num_seqs=1)
    full.add(request("b", [6], 20))
    assert full.plan_run() is not None


def test_a_prompt_that_does_not_fit_changes_no_eviction_order() -> None:
    scheduler = engine_with(request("a", [5, 5, 5, 5, 5], 1), request("b", [6, 6, 6, 6, 6], 30), num_blocks=9)
    before = [block.last_used for block in scheduler.pool._blocks]
    scheduler.add(request("c", [5, 5, 5, 5, *range(100, 130)], 1))
    assert [row.request_id for row in scheduler.plan().rows] == ["b"]
    assert [block.last_used for block in scheduler.pool._blocks] == before
