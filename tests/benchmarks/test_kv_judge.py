"""Answers have to be equal token by token; in bfloat16 a token may be another one that is as likely."""

from kvmesh.lab.bench.kv_judge import Answer, Judge

TOP = ((7, -1.0), (8, -1.03), (9, -1.5))


def judged(dtype: str, tokens: list[int], expected: list[int]) -> tuple[int, int]:
    judge = Judge(dtype)
    judge.compare(Answer(0.0, tokens, ()), Answer(0.0, expected, (), [TOP] * len(expected)))
    return judge.wrong_tokens, judge.rounded_answers


def test_equal_answers_are_right() -> None:
    assert judged("float32", [7, 7], [7, 7]) == judged("bfloat16", [7, 7], [7, 7]) == (0, 0)


def test_in_float32_every_token_that_differs_is_wrong() -> None:
    assert judged("float32", [7, 8, 9], [7, 7, 7]) == (2, 0)


def test_in_bfloat16_a_token_that_is_as_likely_is_rounded_and_ends_the_comparison() -> None:
    assert judged("bfloat16", [7, 8, 1, 2], [7, 7, 7, 7]) == (0, 1)


def test_in_bfloat16_less_likely_tokens_are_wrong() -> None:
    assert judged("bfloat16", [9, 5, 7], [7, 7, 7]) == (2, 0)
