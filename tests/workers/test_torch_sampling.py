"""The torch engine chooses a token by the rules of its sampling parameters."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from kvmesh.protocol.messages import SamplingParams  # noqa: E402
from kvmesh.workers.engines.torch.sampling import adjust, choose, draw, in_falling_order, uniform  # noqa: E402
from kvmesh.workers.executor import Row  # noqa: E402

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.5, 2.5])
MANY = 4000


def row(prompt: Sequence[int] = (), output: Sequence[int] = (), banned: Sequence[int] = (), **sampling: Any) -> Row:
    return Row("r", [0], 0, [0], True, SamplingParams(**sampling), prompt, output, banned)


def token(logits: torch.Tensor, **given: Any) -> int:
    (sampled,) = choose(logits[None], [row(**given)])
    return sampled.token_id


def draws(logits: torch.Tensor, **sampling: Any) -> Counter[int]:
    """Return how often each token comes, over MANY seeds."""
    rows = [row(seed=seed, **sampling) for seed in range(MANY)]
    return Counter(sampled.token_id for sampled in choose(logits.expand(MANY, -1), rows))


def random_logits(rows: int, vocab: int = 50) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1))


# greedy


def test_temperature_zero_takes_the_likeliest_lowest_id() -> None:
    assert token(torch.tensor([0.0, 2.0, 2.0]), temperature=0.0) == 1


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    logits = random_logits(64)
    rows = [row(temperature=5.0, top_k=1, seed=seed) for seed in range(64)]
    assert [sampled.token_id for sampled in choose(logits, rows)] == logits.argmax(-1).tolist()


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    for temperature in (1e-30, 1e-5, 1e-3):
        assert token(100 * LOGITS, temperature=temperature, seed=4) == 1


# the draw


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    counts = draws(LOGITS, temperature=temperature)
    for token_id, share in enumerate((LOGITS / temperature).softmax(-1).tolist()):
        deviation = (MANY * share * (1 - share)) ** 0.5
        assert abs(counts[token_id] - MANY * share) < 4 * deviation


def test_the_draw_depends_on_seed_and_position_alone() -> None:
    logits = random_logits(1)[0]
    once = [token(logits, seed=9, output=[3] * n) for n in range(40)]
    assert once == [token(logits, seed=9, output=[5] * n, prompt=[1, 2]) for n in range(40)]
    assert once != [token(logits, seed=10, output=[3] * n) for n in range(40)]
    assert len(set(once)) > 3


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    logits = random_logits(32)
    rows = [
        row(seed=i, temperature=(i % 4) / 2, top_p=0.5 + i / 64, top_k=i % 7, min_p=(i % 3) / 20) for i in range(32)
    ]
    together = choose(logits, rows)
    assert together == [choose(logits[i : i + 1], [rows[i]])[0] for i in range(32)]


def test_uniform_numbers_are_fixed_for_all_workers_and_below_one() -> None:
    # A change here would change streams that migrate between versions.
    assert uniform(1337, 5) == 0.4810261366860581
    assert uniform(0, 0) != uniform(0, 1) != uniform(1, 0)
    numbers = [uniform(seed, 0) for seed in range(2000)]
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    assert abs(sum(numbers) / 2000 - 0.5) < 0.03
    assert uniform(2**64 - 1, 0) == uniform(-1, 0)


# filters


def test_top_k_keeps_the_likeliest_k() -> None:
    assert set(draws(LOGITS, top_k=3, temperature=3.0)) == {1, 5, 2}


def test_of_equal_tokens_top_k_keeps_the_lowest_ids() -> None:
    assert set(draws(torch.zeros(5), top_k=2)) == {0, 1}


def test_top_p_keeps_the_smallest_set_that_reaches_the_share() -> None:
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    assert set(draws(logits, top_p=0.4)) == {1}
    assert set(draws(logits, top_p=0.7)) == {1, 3}
    assert set(draws(logits, top_p=0.9)) == {1, 3, 0}
    assert set(draws(logits, top_p=1.0)) == {0, 1, 2, 3}


def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    assert set(draws(logits, top_k=2, top_p=0.6)) == {1}
    assert set(draws(logits, top_k=3, top_p=0.6)) == {1, 3}


def test_min_p_keeps_tokens_near_enough_to_the_likeliest() -> None:
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    assert set(draws(logits, min_p=0.25)) == {0, 1, 3}
    assert set(draws(logits, min_p=0.5)) == {1, 3}
    assert set(draws(logits, min_p=1.0)) == {1}


def test_the_kept_tokens_keep_their_proportions() -> None:
    counts = draws(torch.tensor([0.15, 0.5, 0.05, 0.3]).log(), top_k=2)
    assert abs(counts[1] / MANY - 0.5 / 0.8) < 0.03


@pytest.mark.parametrize("size", [1, 7, 300])
def test_sorting_is_stable_on_every_float(size: int) -> None:
    values = random_logits(8, size).round()
    values[0, :] = 0.0
    values[1, size // 2] = float("-inf")
    values[2, ::2] = -0.0
    expected = values.sort(dim=-1, descending=True, stable=True)
    ordered, indices = in_falling_order(values)
    assert torch.equal(indices, expected.indices)
    assert torch.equal(ordered, expected.values)


def test_a_row_of_nan_spoils_no_other_row() -> None:
    logits = torch.stack((LOGITS, torch.full((6,), float("nan")), LOGITS))
    rows = [row(seed=seed, min_p=0.1, top_p=0.9, top_k=4, top_logprobs=1) for seed in range(3)]
    first, spoiled, third = choose(logits, rows)
    assert [first] == choose(logits[:1], rows[:1])
    assert [third] == choose(logits[2:], rows[2:])
    assert 0 <= spoiled.token_id < 6


def test_the_largest_draw_is_still_a_token_that_can_be() -> None:
    below_one = 1 - 2.0**-53
    for logits in random_logits(200):
        logits[10:] = float("-inf")
        likely = logits[:10].topk(3).indices.tolist()
        assert draw(logits[None], [SamplingParams()], [below_one])[0] < 10
        assert draw(logits[None], [SamplingParams(top_k=3)], [below_one]) == likely[-1:]
        assert draw(logits[None], [SamplingParams()], [0.0]) == likely[:1]


# penalties and bans


def reference(logits: Sequence[float], r: Row) -> list[float]:
    """Return the logits after vLLM's penalties, word by word."""
    result = list(logits)
    p = r.sampling
    for i, logit in enumerate(result):
        if i in r.prompt or i in r.output:
            result[i] = logit / p.repetition_penalty if logit > 0 else logit * p.repetition_penalty
        result[i] -= p.frequency_penalty * list(r.output).count(i)
        result[i] -= p.presence_penalty * (i in r.output)
    return result


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.7},
        {"frequency_penalty": -0.4},
        {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 0.3},
    ],
)
def test_penalties_equal_those_of_vllm(sampling: dict[str, float]) -> None:
    r = row(prompt=[0, 3, 3], output=[5, 5, 1, 3], **sampling)
    adjusted = adjust(LOGITS[None], [r])[0]
    assert adjusted.tolist() == pytest.approx(reference(LOGITS.tolist(), r), abs=1e-6)


def test_one_rows_penalties_leave_the_others_and_the_logits_alone() -> None:
    logits = LOGITS.repeat(2, 1)
    adjusted = adjust(logits, [row(), row(output=[1], presence_penalty=9.0)])
    assert torch.equal(adjusted[0], LOGITS)
    assert torch.equal(logits, LOGITS.repeat(2, 1))


def test_a_penalty_decides_greedy_choices_too() -> None:
    assert token(LOGITS, temperature=0.0, output=[1], presence_penalty=2.0) == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_banned_tokens_are_never_chosen(temperature: float) -> None:
    rows = [row(seed=seed, temperature=temperature, banned=[1, 5, 0]) for seed in range(500)]
    assert {sampled.token_id for sampled in choose(LOGITS.expand(500, -1), rows)} <= {2, 3, 4}


def test_bans_and_penalties_on_ids_the_model_lacks_do_nothing() -> None:
    given = {"banned": [6, 4_000_000_000, -1], "output": [77], "presence_penalty": 1.0}
    assert token(LOGITS, temperature=0.0, **given) == 1


# biases, allowed tokens, guides


class OnlyThese:
    """A guide that has come to where these may follow."""

    def __init__(self, *token_ids: int) -> None:
        self._allowed = np.isin(np.arange(len(LOGITS)), token_ids)

    def allowed(self) -> NDArray[np.bool_]:
        return self._allowed


class Failed:
    def allowed(self) -> None:
        return None


def guided(guide: Any, **given: Any) -> int:
    made = row(**{"temperature": 0.0, **given})
    made.guide = guide
    return choose(LOGITS[None], [made])[0].token_id


def test_a_bias_is_added_to_the_logit() -> None:
    assert token(LOGITS, temperature=0.0, logit_bias=((4, 2.4),)) == 1
    assert token(LOGITS, temperature=0.0, logit_bias=((4, 2.6),)) == 4
    assert token(LOGITS, temperature=0.0, logit_bias=((1, -100.0), (5, -100.0))) == 2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_bias_comes_before_the_temperature(temperature: float) -> None:
    biased = LOGITS.clone()
    biased[3] += 3.5
    given: dict[str, Any] = {"temperature": temperature, "top_p": 0.9}
    assert draws(LOGITS, logit_bias=((3, 3.5),), **given) == draws(biased, **given)


def test_a_bias_comes_after_the_penalties() -> None:
    """A penalty that multiplies would change what was added before it."""
    given: dict[str, Any] = {"temperature": 0.0, "output": [4], "repetition_penalty": 10.0}
    assert token(LOGITS, logit_bias=((4, 2.97),), **given) == 4  # 0.5 / 10 + 2.97 > 3
    assert token(LOGITS, logit_bias=((4, 2.94),), **given) == 1


def test_of_two_biases_for_one_token_the_last_counts() -> None:
    assert token(LOGITS, temperature=0.0, logit_bias=((4, 9.0), (4, 1.0))) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_only_allowed_tokens_are_chosen(temperature: float) -> None:
    rows = [row(seed=seed, temperature=temperature, allowed_token_ids=(3, 4, 4)) for seed in range(500)]
    expected = {4} if temperature == 0 else {3, 4}
    assert {sampled.token_id for sampled in choose(LOGITS.expand(500, -1), rows)} == expected


def test_a_bias_moves_nothing_that_is_not_allowed() -> None:
    assert token(LOGITS, temperature=0.0, logit_bias=((0, 100.0),), allowed_token_ids=(3, 4)) == 4


def test_a_ban_counts_unless_no_allowed_token_remains() -> None:
    assert token(LOGITS, temperature=0.0, allowed_token_ids=(1, 4), banned=[1]) == 4
    assert token(LOGITS, temperature=0.0, allowed_token_ids=(1, 4), banned=[1, 4]) == 1


def test_the_guide_counts_more_than_what_else_is_asked_for() -> None:
    assert guided(OnlyThese(0, 4)) == 0
    assert guided(OnlyThese(0, 4), banned=[0]) == 4
    assert guided(OnlyThese(0), banned=[0]) == 0
    assert guided(OnlyThese(0, 4), allowed_token_ids=(4, 5)) == 4
    assert guided(OnlyThese(0, 4), allowed_token_ids=(1, 5), logit_bias=((1, 50.0),)) == 0


def test_a_guide_that_failed_does_not_stop_the_others() -> None:
    assert guided(Failed()) == 1


def test_rules_of_one_row_leave_the_others_alone() -> None:
    rows = [row(temperature=0.0), row(temperature=0.0, allowed_token_ids=(3,)), row(temperature=0.0)]
    logits = LOGITS.repeat(3, 1)
    assert [sampled.token_id for sampled in choose(logits, rows)] == [1, 3, 1]
    assert torch.equal(logits, LOGITS.repeat(3, 1))


# logprobs


def test_logprobs_come_only_where_they_are_asked_for() -> None:
    first, second, third = choose(
        LOGITS.repeat(3, 1), [row(), row(top_logprobs=0, temperature=0.0), row(top_logprobs=2)]
    )
    assert first.logprob is None
    assert second.logprob is not None
    assert second.logprob.token_id == 1
    assert second.logprob.top == ()
    assert third.logprob is not None
    assert len(third.logprob.top) == 2


def test_logprobs_are_those_of_the_model_before_any_adjustment() -> None:
    (sampled,) = choose(
        LOGITS[None],
        [
            row(
                top_logprobs=6,
                temperature=3.0,
                top_k=2,
                output=[1],
                presence_penalty=5.0,
                banned=[5],
                logit_bias=((0, 7.0),),
                allowed_token_ids=(0, 2, 5),
            )
        ],
    )
    assert sampled.logprob is not None
    expected = LOGITS.log_softmax(-1)
    assert [token_id for token_id, _ in sampled.logprob.top] == LOGITS.argsort(descending=True).tolist()
    for token_id, logprob in (*sampled.logprob.top, (sampled.token_id, sampled.logprob.logprob)):
        assert logprob == pytest.approx(expected[token_id].item(), abs=1e-6)
    assert sum(torch.tensor([logprob for _, logprob in sampled.logprob.top]).exp()) == pytest.approx(1.0)


def test_asking_for_more_logprobs_than_tokens_gives_all() -> None:
    (sampled,) = choose(LOGITS[None], [row(top_logprobs=20)])
    assert sampled.logprob is not None
    assert len(sampled.logprob.top) == 6
