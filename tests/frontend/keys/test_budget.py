"""The limits of one key, kept for several frontends."""

from kvmesh.frontend.keys.budget import HOLD_S, Budget, KeyLimits, OverLimit, left_of
from kvmesh.frontend.keys.meter import Estimate, reserved_tokens


def test_a_refusal_names_the_limit_and_takes_nothing() -> None:
    budget = Budget(KeyLimits(requests=2, tokens=100))
    assert budget.take(0.0, 1, 90) == 0
    assert budget.take(1.0, 1, 20) == OverLimit("tokens", 59.5)
    assert budget.take(1.0, 1, 10) == 2
    assert budget.take(1.0, 1, 0) == OverLimit("requests", 59.5)
    assert budget.used(1.0) == (2, 100)


def test_a_key_without_limits_is_never_refused() -> None:
    budget = Budget(KeyLimits())
    assert not isinstance(budget.take(0.0, 10**9, 10**9), OverLimit)
    assert left_of(budget, 0.0).headers() == {}


def test_streams_are_shared_and_those_of_a_silent_frontend_return() -> None:
    budget = Budget(KeyLimits(streams=5))
    assert budget.hold(0.0, "a", in_use=3, wanted=4) == 4
    assert budget.hold(0.0, "b", in_use=0, wanted=4) == 1
    assert budget.hold(1.0, "a", in_use=1, wanted=1) == 1
    assert budget.hold(1.0, "b", in_use=1, wanted=9) == 4
    assert budget.hold(1.0 + HOLD_S, "c", in_use=0, wanted=9) == 5


def test_a_frontend_keeps_the_streams_that_it_uses() -> None:
    budget = Budget(KeyLimits(streams=2))
    budget.hold(0.0, "a", in_use=2, wanted=2)
    assert budget.hold(0.0, "b", in_use=3, wanted=3) == 3
    assert budget.streams_free(0.0, "c") == 0


def test_changed_limits_keep_what_was_used() -> None:
    budget = Budget(KeyLimits(requests=10))
    budget.take(0.0, 10, 0)
    budget.set_limits(KeyLimits(requests=12, tokens=5))
    assert (left_of(budget, 0.0).requests, left_of(budget, 0.0).tokens) == (2, 5)
    budget.set_limits(KeyLimits(requests=3))
    assert left_of(budget, 0.0).requests == 0


def test_the_headers_are_openais() -> None:
    budget = Budget(KeyLimits(requests=10, tokens=100))
    budget.take(0.2, 1, 30)
    assert left_of(budget, 0.5).headers() == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "60.000s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "70",
        "x-ratelimit-reset-tokens": "60.000s",
    }


def test_a_named_limit_of_the_answer_is_reserved_whole() -> None:
    assert reserved_tokens(100, 50, 9999, 1000) == 150


def test_without_a_named_limit_the_usual_length_is_reserved() -> None:
    estimate = Estimate()
    for _ in range(200):
        estimate.note(40)
    assert reserved_tokens(100, None, estimate.tokens, 1000) == 140


def test_a_limit_that_is_hardly_reached_does_not_reserve_the_minute() -> None:
    assert reserved_tokens(100, 32_000, 50, 10_000) == 2500
    assert reserved_tokens(100, 32_000, 5000, 10_000) == 5100
    assert reserved_tokens(9000, 32_000, 5000, 10_000) == 10_000
