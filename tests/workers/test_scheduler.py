"""The scheduler chooses the sequences of a step, preempts the right one, and keeps the blocks of a prefill leg."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.pool import BlockPool
from kvmesh.kvcache.tiers.index import TierIndex
from kvmesh.kvcache.tiers.rates import TierRates
from kvmesh.kvcache.tiers.stack import TierLevel, TierStack
from kvmesh.protocol.errors import ContextLengthError, InvalidRequestError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import (
    FinishReason,
    GenerateRequest,
    KvLayout,
    StopConditions,
    Ticket,
    pack_tokens,
)
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.engines.mock.executor import MockExecutor, mock_token
from kvmesh.workers.executor import Sampled
from kvmesh.workers.scheduler import Limits, Output, Scheduler, Step
from tests.support.budget import examples

BLOCK = 4
EOS = 2


def make(num_blocks: int = 64, max_num_seqs: int = 8, max_step_tokens: int = 16, context: int = 256) -> Scheduler:
    limits = Limits(max_num_seqs, max_step_tokens, context, vocab_size=1000)
    return Scheduler(BlockPool(num_blocks, BLOCK), limits, [EOS])


def request(name: str, prompt: Sequence[int], max_tokens: int = 4, **fields: object) -> GenerateRequest:
    stop = StopConditions(max_tokens=max_tokens, min_tokens=fields.pop("min_tokens", 0))  # type: ignore[arg-type]
    return GenerateRequest(request_id=RequestId(name), model="m", prompt=pack_tokens(prompt), stop=stop, **fields)  # type: ignore[arg-type]


def run_step(scheduler: Scheduler, token: int = 9) -> tuple[Step, list[Output]]:
    step = scheduler.plan()
    return step, scheduler.complete(step, [Sampled(token) if row.sample else None for row in step.rows])


def test_a_long_prompt_is_computed_in_chunks_and_sampled_once() -> None:
    scheduler = make(max_step_tokens=10)
    scheduler.add(request("a", range(100, 125)))
    chunks = [run_step(scheduler) for _ in range(3)]
    assert [len(step.rows[0].token_ids) for step, _ in chunks] == [10, 10, 5]
    assert [len(outputs) for _, outputs in chunks] == [0, 0, 1]


def test_streams_that_decode_go_before_prompts() -> None:
    scheduler = make(max_step_tokens=10)
    scheduler.add(request("a", [1, 2, 3]))
    run_step(scheduler)
    scheduler.add(request("b", range(100, 130)))
    step, _ = run_step(scheduler)
    assert [(row.request_id, len(row.token_ids)) for row in step.rows] == [("a", 1), ("b", 9)]


def test_only_the_last_cached_token_is_computed_again() -> None:
    scheduler = make()
    scheduler.add(request("a", range(100, 108), max_tokens=1))
    run_step(scheduler)
    scheduler.add(request("b", range(100, 108), max_tokens=1))
    step, [output] = run_step(scheduler)
    assert (step.rows[0].start, list(step.rows[0].token_ids)) == (4, [104, 105, 106, 107])
    assert output.delta.cached_tokens == 4


def test_a_salt_keeps_tenants_apart() -> None:
    scheduler = make()
    scheduler.add(request("a", range(100, 120), max_tokens=1, cache_salt="tenant-a"))
    run_step(scheduler), run_step(scheduler)
    scheduler.add(request("b", range(100, 120), max_tokens=1, cache_salt="tenant-b"))
    step, _ = run_step(scheduler)
    assert step.rows[0].start == 0


def test_answers_end_by_stop_token_length_or_context() -> None:
    scheduler = make(context=12)
    scheduler.add(request("stop", [1], max_tokens=9))
    scheduler.add(request("length", [1, 5], max_tokens=1))
    scheduler.add(request("context", range(100, 111), max_tokens=99))
    _, outputs = run_step(scheduler, EOS)
    reasons = {o.request_id: o.delta.finish_reason for o in outputs}
    assert reasons == {"stop": FinishReason.STOP, "length": FinishReason.STOP, "context": FinishReason.STOP}
    scheduler.add(request("length", [1, 5], max_tokens=1))
    scheduler.add(request("context", range(100, 111), max_tokens=99))
    _, outputs = run_step(scheduler)
    assert {o.delta.finish_reason for o in outputs} == {FinishReason.LENGTH}


def test_min_tokens_bans_stop_tokens_until_then() -> None:
    scheduler = make()
    scheduler.add(request("a", [1], max_tokens=9, min_tokens=2))
    banned = [list(run_step(scheduler)[0].rows[0].banned) for _ in range(3)]
    assert banned == [[EOS], [EOS], []]


def test_the_youngest_gives_way_when_blocks_run_out() -> None:
    scheduler = make(num_blocks=4, max_step_tokens=64)
    scheduler.add(request("old", range(100, 107), max_tokens=9))
    scheduler.add(request("young", range(200, 207), max_tokens=9))
    run_step(scheduler)
    for _ in range(2):
        step, _ = run_step(scheduler)
    assert [row.request_id for row in step.rows] == ["old"]
    assert scheduler.num_waiting == 1


def test_what_can_never_fit_is_refused_at_once() -> None:
    scheduler = make(num_blocks=4, context=256)
    with pytest.raises(ContextLengthError, match="context of this model 256"):
        scheduler.add(request("a", range(300)))
    with pytest.raises(ContextLengthError, match="more --num-blocks"):
        scheduler.add(request("a", range(10), max_tokens=100))
    with pytest.raises(InvalidRequestError, match="empty"):
        scheduler.add(request("a", []))
    scheduler.add(request("a", [1]))
    with pytest.raises(InvalidRequestError, match="already"):
        scheduler.add(request("a", [1]))


def test_a_prefill_leg_keeps_its_blocks_for_the_decode_worker() -> None:
    scheduler = make()
    scheduler.add(request("a", range(100, 110), offer_kv=True))
    _, [output] = run_step(scheduler)
    assert (len(output.handoff), output.num_tokens, output.delta.finish_reason) == (3, 10, None)
    assert scheduler.pool.held_blocks == 3
    scheduler.pool.release(output.handoff)
    assert scheduler.pool.held_blocks == 0


def ticket(num_tokens: int) -> Ticket:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK, dtype="float32")
    blocks = tuple(range(-(-num_tokens // BLOCK)))
    return Ticket(
        offer_id=1, worker_id=WorkerId("p"), address="", backend="shm", nonce=1, slot=0, peer=b"",
        layout=layout, block_ids=blocks, num_tokens=num_tokens,
    )  # fmt: skip


def test_a_pull_skips_the_last_token_and_cached_blocks() -> None:
    scheduler = make()
    scheduler.add(request("before", range(100, 106), max_tokens=1))
    run_step(scheduler)
    scheduler.add(request("a", range(100, 110), generated=(7,), ticket=ticket(10)))
    step = scheduler.plan()
    [pull] = step.pulls
    assert (step.rows, pull.skip, len(pull.into)) == ([], 1, 2)
    scheduler.pull_ended(pull.sequence, arrived=True)
    step, [output] = run_step(scheduler)
    assert (step.rows[0].start, list(step.rows[0].token_ids)) == (10, [7])
    assert output.delta.token_ids == (9,)


def test_a_pull_begins_while_a_step_is_computed_but_overtakes_nobody() -> None:
    scheduler = make()
    scheduler.add(request("before", range(5)))
    step = scheduler.plan()
    scheduler.add(request("a", range(100, 110), generated=(7,), ticket=ticket(10)))
    scheduler.add(request("computed", range(200, 210)))
    scheduler.add(request("b", range(300, 310), generated=(7,), ticket=ticket(10)))
    moves = scheduler.plan_moves()
    assert ([pull.sequence.request_id for pull in moves.pulls], moves.rows) == (["a"], [])
    assert (scheduler.plan_moves().pulls, scheduler.num_waiting) == ([], 2)
    scheduler.complete(step, [Sampled(9)])
    assert [pull.sequence.request_id for pull in scheduler.plan().pulls] == ["b"]


def test_blocks_of_an_aborted_request_are_handed_out_after_its_step() -> None:
    """The step still writes to them, and a pull that began meanwhile would be overwritten."""
    scheduler = make()
    scheduler.add(request("leaves", range(9)))
    step = scheduler.plan()
    scheduler.abort(RequestId("leaves"))
    scheduler.add(request("pulls", range(100, 110), generated=(7,), ticket=ticket(10)))
    assert scheduler.plan_moves().pulls == []
    assert scheduler.complete(step, [Sampled(9)]) == []
    assert len(scheduler.plan().pulls) == 1


def with_tier(tokens: Sequence[int]) -> Scheduler:
    """Return a scheduler whose host memory holds these tokens, which the device holds no more."""
    pool = BlockPool(16, BLOCK)
    level = TierLevel(TierIndex(Tier.HOST, 64, BLOCK, lambda _: None), TierRates(1000))
    tiers = TierStack(pool, [level], b"model", offload="through")
    scheduler = Scheduler(pool, Limits(8, 16, 256, 1000), [], tiers)
    for number, prompt in enumerate((tokens, range(900, 960))):
        scheduler.add(request(f"before-{number}", prompt, max_tokens=1))
        while scheduler.num_running or scheduler.num_waiting:
            run_step(scheduler)
        for save in tiers.plan_saves():
            tiers.saved(save, arrived=True)
    return scheduler


def test_a_load_begins_while_a_step_is_computed() -> None:
    scheduler = with_tier(range(100, 108))
    scheduler.add(request("other", range(500, 505)))
    step = scheduler.plan()
    scheduler.add(request("again", range(100, 110)))
    [load] = scheduler.plan_moves().loads
    assert len(load.into) == 2
    scheduler.complete(step, [Sampled(9)])
    scheduler.load_ended(load, 2)
    assert [(row.request_id, row.start) for row in scheduler.plan().rows] == [("other", 5), ("again", 8)]


def test_a_load_does_not_begin_before_a_step_that_computes_what_follows_it() -> None:
    scheduler = with_tier(range(100, 108))
    scheduler.add(request("first", range(100, 116)))
    [load] = scheduler.plan().loads
    scheduler.load_ended(load, 0)  # it failed
    step = scheduler.plan()
    scheduler.add(request("second", range(100, 116)))
    assert scheduler.plan_moves().loads == []
    scheduler.complete(step, [Sampled(9)])
    assert [row.start for row in scheduler.plan().rows] == [16, 12], "it finds what the step has computed"


def test_queued_tokens_count_prompts_to_compute_not_pulls() -> None:
    scheduler = make(max_num_seqs=1)
    scheduler.add(request("long", range(50)))
    scheduler.add(request("next", range(100, 130)))
    scheduler.add(request("pulled", range(200, 240), generated=(7,), ticket=ticket(40)))
    assert scheduler.queued_tokens == 50 + 30
    run_step(scheduler)
    assert scheduler.queued_tokens == 50 - 16 + 30
    for _ in range(3):
        run_step(scheduler)
    assert scheduler.queued_tokens == 30, "one that decodes has nothing left to compute"


def test_certain_tokens_are_those_of_admitted_prompts_after_the_next_step() -> None:
    scheduler = make(max_num_seqs=1)  # steps of 16 tokens
    scheduler.add(request("long", range(50)))
    scheduler.add(request("next", range(100, 130)))
    assert scheduler.certain_tokens == 0, "what is cached of a prompt that waits is not known"
    for remaining in (50 - 32, 50 - 48, 0, 0):
        run_step(scheduler)
        assert scheduler.certain_tokens == remaining


def test_a_failed_pull_is_computed_instead() -> None:
    scheduler = make()
    scheduler.add(request("a", range(100, 110), generated=(7,), ticket=ticket(10)))
    [pull] = scheduler.plan().pulls
    scheduler.pull_ended(pull.sequence, arrived=False)
    step, _ = run_step(scheduler)
    assert (step.rows[0].start, len(step.rows[0].token_ids)) == (0, 11)


def test_a_ticket_for_another_prompt_is_not_used() -> None:
    scheduler = make()
    scheduler.add(request("a", range(100, 110), generated=(7,), ticket=ticket(9)))
    step = scheduler.plan()
    assert (step.pulls, len(step.rows)) == ([], 1)


def test_an_aborted_pull_frees_its_blocks_when_it_ends() -> None:
    scheduler = make()
    scheduler.add(request("a", range(100, 110), generated=(7,), ticket=ticket(10)))
    [pull] = scheduler.plan().pulls
    scheduler.abort(RequestId("a"))
    scheduler.pull_given_up(pull)
    assert (scheduler.pool.held_blocks, scheduler.num_running) == (3, 0)
    scheduler.pull_let_go(pull)
    assert scheduler.pool.held_blocks == 0


def test_a_pull_that_hangs_does_not_hold_its_request_up() -> None:
    scheduler = make()
    scheduler.add(request("before", range(100, 106), max_tokens=1))
    run_step(scheduler)
    scheduler.add(request("a", range(100, 110), generated=(7,), ticket=ticket(10)))
    [pull] = scheduler.plan().pulls
    scheduler.pull_given_up(pull)
    step, _ = run_step(scheduler)
    assert (step.rows[0].start, len(step.rows[0].token_ids), step.pulls) == (4, 7, [])
    assert not set(pull.into) & set(step.rows[0].block_table), "the hanging pull may still write into those"
    scheduler.pull_let_go(pull)


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="vocabulary of 1000"):
        make().add(request("a", [5, 1000]))


def test_an_abort_during_a_step_drops_its_result() -> None:
    scheduler = make()
    scheduler.add(request("a", range(100, 110)))
    step = scheduler.plan()
    scheduler.abort(RequestId("a"))
    assert scheduler.complete(step, [Sampled(9)]) == []
    assert scheduler.pool.held_blocks == 0


@settings(max_examples=examples(150))
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(12, 40), budget=st.integers(1, 40))
def test_any_mix_of_requests_is_answered_and_leaves_nothing(seed: int, num_blocks: int, budget: int) -> None:
    """The mock's KV cache holds the tokens themselves and complains of any that is not the row's own."""
    rng = random.Random(seed)
    executor = MockExecutor(block_size=BLOCK, vocab_size=64, speedup=0)
    executor.load()
    executor.allocate_kv(num_blocks, None)
    scheduler = make(num_blocks, max_num_seqs=5, max_step_tokens=budget)
    asked: dict[str, tuple[list[int], int]] = {}
    got: dict[str, list[int]] = {}
    for step_number in range(4000):
        if step_number > 60 and not (scheduler.num_running or scheduler.num_waiting):
            break
        if step_number < 60 and rng.random() < 0.5:
            shared = [7] * rng.randrange(12)
            prompt = shared + [rng.randrange(3, 9) for _ in range(rng.randrange(1, 14))]
            asked[str(step_number)] = (prompt, rng.randrange(1, 12))
            scheduler.add(request(str(step_number), prompt, asked[str(step_number)][1]))
        if asked and rng.random() < 0.05:
            victim = rng.choice(list(asked))
            scheduler.abort(RequestId(victim))
            if len(got.get(victim, [])) < asked[victim][1]:
                del asked[victim]
        step = scheduler.plan()
        assert sum(len(row.token_ids) for row in step.rows) <= budget
        for output in scheduler.complete(step, executor.execute(step.rows)):
            got.setdefault(output.request_id, []).extend(output.delta.token_ids)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.pool.held_blocks) == (0, 0, 0)
    for name, (prompt, count) in asked.items():
        assert got[name] == [mock_token(prompt, i, 64) for i in range(count)]
