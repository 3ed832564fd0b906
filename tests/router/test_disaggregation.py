"""A request is served by one worker or by two."""

import pytest

from kvmesh.router.disaggregation import Backlog, LocalPrefill, decide

RULE = LocalPrefill(max_tokens=100, max_share=0.5)


@pytest.mark.parametrize(
    ("isl", "cached", "disaggregate"),
    [
        (1000, 0, True),  # much, and all of it
        (1000, 899, True),  # 101 tokens are too many
        (1000, 900, True),  # 100 are not fewer than 100
        (1000, 901, False),  # few, and a small share
        (150, 76, False),  # 74 of 150
        (150, 75, True),  # half is not below half
        (10, 0, True),  # few, but all of the prompt
        (10, 10, False),
        (10, 16, False),  # the cache holds more than the prompt
    ],
)
def test_a_decode_worker_computes_a_small_rest_of_a_prompt(isl: int, cached: int, disaggregate: bool) -> None:
    assert decide(isl, cached, True, None, RULE).disaggregate is disaggregate


def test_without_a_prefill_worker_there_is_no_choice() -> None:
    for wish in (None, True, False):
        decision = decide(1000, 0, False, wish, RULE)
        assert not decision.disaggregate
        assert decision.reason == "no prefill worker is ready"


def test_a_wish_is_granted_where_possible() -> None:
    assert decide(10, 10, True, True, RULE).disaggregate
    assert not decide(1000, 0, True, False, RULE).disaggregate
    assert decide(1000, 0, True, False, RULE).reason == "asked for by the caller"


def test_a_wish_outweighs_a_backlog() -> None:
    assert decide(1000, 0, True, True, RULE, Backlog(10**6, 0, is_full=True)).disaggregate


def test_a_limit_of_0_disaggregates_everything() -> None:
    assert decide(10, 10, True, None, LocalPrefill(max_tokens=0)).disaggregate
    assert decide(10, 10, True, None, LocalPrefill(max_share=0.0)).disaggregate


@pytest.mark.parametrize(
    ("there", "here", "is_full", "disaggregate"),
    [
        (6000, 1000, True, False),  # prefill workers are the bottleneck
        (6000, 1000, False, True),  # they can still take it: its streams are not to be disturbed
        (6000, 6000, True, True),  # it is no sooner here
        (6000, 9000, True, True),
    ],
)
def test_a_sooner_decode_worker_helps_out_full_prefill_workers(
    there: float, here: float, is_full: bool, disaggregate: bool
) -> None:
    assert decide(1000, 0, True, None, RULE, Backlog(there, here, is_full)).disaggregate is disaggregate


@pytest.mark.parametrize(("spare_share", "disaggregate"), [(0.01, False), (0.0, True), (-0.5, True)])
def test_a_decode_worker_helps_while_its_answers_can_bear_it(spare_share: float, disaggregate: bool) -> None:
    backlog = Backlog(6000, 1000, is_full=True, spare_share=spare_share)
    assert decide(1000, 0, True, None, RULE, backlog).disaggregate is disaggregate


def test_a_small_rest_and_a_wish_outweigh_the_answers() -> None:
    backlog = Backlog(6000, 1000, is_full=True, spare_share=-1.0)
    assert not decide(1000, 950, True, None, RULE, backlog).disaggregate
    assert not decide(1000, 0, True, False, RULE, backlog).disaggregate


def test_the_reason_names_the_numbers() -> None:
    assert decide(1000, 100, True, None, RULE).reason == "900 of 1000 prompt tokens are to compute"
    assert "only 50 of 1000" in decide(1000, 950, True, None, RULE).reason
    reason = decide(1000, 0, True, None, RULE, Backlog(6000.4, 1000, is_full=True)).reason
    assert "6000 tokens to compute there" in reason
    assert "1000 here" in reason
    waits = decide(1000, 0, True, None, RULE, Backlog(6000, 1000, is_full=True, spare_share=0.0)).reason
    assert waits.startswith("answers on the decode worker need its time, though 6000 tokens")
