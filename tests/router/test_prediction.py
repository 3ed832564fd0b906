"""Predictions say what a worker's cache will hold because a request was sent there."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.protocol.hashing import pack_hashes, sequence_hashes
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.router.index import Holder
from kvmesh.router.prediction import _OVERHEAD_BLOCKS, PredictedPrefixes
from tests.support.budget import examples

A, A1, B = Holder(WorkerId("a"), 0), Holder(WorkerId("a"), 1), Holder(WorkerId("b"), 0)
R, S, T = RequestId("r"), RequestId("s"), RequestId("t")


def chain(*tokens: int) -> bytes:
    """The prompt of these tokens, one a block."""
    return pack_hashes(sequence_hashes(tokens, 1))


def is_forgotten(predicted: PredictedPrefixes) -> bool:
    maps = (predicted._predictions, predicted._of_holder, predicted._of_request)
    return not any(maps) and (predicted._chains.num_blocks, predicted._counted_blocks, len(predicted)) == (0, 0, 0)


def test_siblings_find_the_prefix_of_a_placed_request() -> None:
    predicted = PredictedPrefixes()
    predicted.placed(R, A, chain(1, 2, 3), 0.0)
    assert predicted.match(chain(1, 2, 9), 0.0) == {A: 2}
    assert predicted.match(chain(2, 3), 0.0) == {}
    assert predicted.match(b"", 0.0) == {}


def test_a_request_may_be_placed_on_two_workers() -> None:
    """The request prefills on one worker and decodes on the other; both will have the prompt."""
    predicted = PredictedPrefixes()
    predicted.placed(R, A, chain(1, 2), 0.0)
    predicted.placed(R, B, chain(1, 2), 0.0)
    assert predicted.match(chain(1, 2), 0.0) == {A: 2, B: 2}
    predicted.forget(R)
    assert is_forgotten(predicted)


def test_a_holder_that_has_reported_has_no_predictions() -> None:
    predicted = PredictedPrefixes()
    predicted.placed(R, A, chain(1, 2), 0.0)
    predicted.placed(R, B, chain(1, 2), 0.0)
    predicted.forget_holder(A)
    assert predicted.match(chain(1, 2), 0.0) == {B: 2}
    predicted.forget_holder(B)
    assert is_forgotten(predicted)


def test_a_prediction_ends_after_its_time() -> None:
    predicted = PredictedPrefixes(ttl_s=5.0)
    predicted.placed(R, A, chain(1, 2), 0.0)
    assert predicted.match(chain(1, 2), 4.9) == {A: 2}
    assert predicted.match(chain(1, 2), 5.0) == {}
    assert is_forgotten(predicted)


def test_a_prefix_that_is_sent_again_stays() -> None:
    predicted = PredictedPrefixes(ttl_s=5.0)
    predicted.placed(R, A, chain(1, 2, 3), 0.0)
    predicted.placed(S, A, chain(1, 2, 4), 3.0)
    assert predicted.match(chain(1, 2, 3), 6.0) == {A: 2}
    assert predicted.match(chain(1, 2, 4), 6.0) == {A: 3}


def test_a_failed_request_takes_only_its_own_prediction() -> None:
    predicted = PredictedPrefixes()
    predicted.placed(R, A, chain(1, 2, 3), 0.0)
    predicted.placed(S, A, chain(1, 2), 0.0)
    predicted.forget(R)
    predicted.forget(R)
    assert predicted.match(chain(1, 2, 3), 0.0) == {A: 2}


def test_a_request_that_is_placed_again_is_predicted_once() -> None:
    predicted = PredictedPrefixes(ttl_s=5.0)
    predicted.placed(R, A, chain(1, 2, 3), 0.0)
    predicted.placed(R, A, chain(1, 2), 3.0)
    assert (predicted.match(chain(1, 2, 3), 6.0), len(predicted)) == ({A: 2}, 1)


def test_a_worker_that_left_is_forgotten_with_all_its_ranks() -> None:
    predicted = PredictedPrefixes()
    for holder in (A, A1, B):
        predicted.placed(R, holder, chain(1, 2), 0.0)
    predicted.forget_worker(WorkerId("a"))
    assert predicted.match(chain(1, 2), 0.0) == {B: 2}
    predicted.forget_worker(WorkerId("b"))
    assert is_forgotten(predicted)


def test_a_prompt_without_a_full_block_predicts_nothing() -> None:
    predicted = PredictedPrefixes()
    predicted.placed(R, A, b"", 0.0)
    assert is_forgotten(predicted)


def test_a_full_pool_drops_the_oldest_prompt_deepest_first() -> None:
    predicted = PredictedPrefixes(ttl_s=120.0)
    predicted.placed(R, A, chain(1, 2, 3, 4), 0.0, pool_blocks=6)
    predicted.placed(S, A, chain(1, 5, 6), 1.0, pool_blocks=6)
    assert predicted._chains.blocks_of(A) == 6
    predicted.placed(T, A, chain(7, 8), 2.0, pool_blocks=6)
    assert predicted._chains.blocks_of(A) == 6
    assert predicted.match(chain(1, 2, 3, 4), 2.0) == {A: 2}
    assert predicted.match(chain(1, 5, 6), 2.0) == {A: 3}
    assert predicted.match(chain(7, 8), 2.0) == {A: 2}


def test_only_the_beginning_of_an_oversized_prompt_is_predicted() -> None:
    predicted = PredictedPrefixes()
    predicted.placed(R, A, chain(1, 2, 3, 4), 0.0, pool_blocks=3)
    assert predicted.match(chain(1, 2, 3, 4), 0.0) == {A: 3}


def test_each_pool_has_its_own_limit() -> None:
    predicted = PredictedPrefixes()
    predicted.placed(R, A, chain(1, 2), 0.0, pool_blocks=2)
    predicted.placed(S, B, chain(3, 4), 0.0, pool_blocks=2)
    assert predicted._chains.num_blocks == 4


def test_memory_is_bounded_whatever_is_sent() -> None:
    predicted = PredictedPrefixes(max_blocks=3 * (2 + _OVERHEAD_BLOCKS))
    for number in range(10):
        predicted.placed(RequestId(f"r{number}"), A, chain(number, 0), 0.0)
    assert len(predicted) == 3
    assert [number for number in range(10) if predicted.match(chain(number), 0.0)] == [7, 8, 9]


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.integers(0, 6), st.sampled_from([A, A1, B]), prompts),
        st.tuples(st.just("forget"), st.integers(0, 6), st.none(), st.just(())),
        st.tuples(st.just("leave"), st.just(0), st.sampled_from([A, B]), st.just(())),
        st.tuples(st.just("match"), st.just(0), st.none(), prompts),
    ),
    max_size=40,
)
Model = dict[tuple[str, Holder], tuple[float, tuple[int, ...]]]


def trimmed(model: Model, holder: Holder, pool_blocks: int) -> Model:
    """Block by block: while a pool has too many, the oldest prompt that has a block of its own loses its last."""

    def prefixes(model: Model) -> set[tuple[int, ...]]:
        return {tokens[: n + 1] for (_, h), (_, tokens) in model.items() if h == holder for n in range(len(tokens))}

    while len(prefixes(model)) > pool_blocks:
        oldest = next(name for name in model if name[1] == holder)
        placed_s, tokens = model[oldest]
        model = model | {oldest: (placed_s, tokens[:-1])} if tokens else {n: p for n, p in model.items() if n != oldest}
    return model


@settings(max_examples=examples(150))
@given(steps, st.sampled_from([None, 3, 6]))
def test_it_matches_what_the_living_predictions_say_and_ends_empty(steps: list, pool_blocks: int | None) -> None:
    predicted, model, now = PredictedPrefixes(ttl_s=8.0), Model(), 0.0
    for now, (what, number, holder, tokens) in enumerate(steps):
        name = RequestId(f"r{number}")
        model = {key: (at, prompt) for key, (at, prompt) in model.items() if at + 8.0 > now}
        match what:
            case "place":
                model.pop((name, holder), None)
                model[name, holder] = (now, tokens)
                model = model if pool_blocks is None else trimmed(model, holder, pool_blocks)
                predicted.placed(name, holder, chain(*tokens), now, pool_blocks)
            case "forget":
                model = {key: one for key, one in model.items() if key[0] != name}
                predicted.forget(name)
            case "leave":
                model = {key: one for key, one in model.items() if key[1].worker_id != holder.worker_id}
                predicted.forget_worker(holder.worker_id)
            case _:
                depths = {
                    h: max(common(tokens, prompt) for (_, other), (_, prompt) in model.items() if other == h)
                    for h in {key[1] for key in model}
                }
                assert predicted.match(chain(*tokens), now) == {h: depth for h, depth in depths.items() if depth}
        for h in (A, A1, B):
            assert pool_blocks is None or predicted._chains.blocks_of(h) <= pool_blocks
    predicted.match(b"", now + 8.0)
    assert is_forgotten(predicted)


def common(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
