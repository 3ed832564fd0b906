"""Test when digests are compared, and how often."""

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvevents.audit import Audit
from kvmesh.protocol.events import Digest


def held(number: int) -> Digest:
    """Return the digest of a follower that has missed nothing, after a batch."""
    return Digest(number, 1000 + number)


@given(st.integers(0, 5), st.integers(0, 5), st.integers(-3, 8), st.booleans())
def test_whatever_overtakes_what_the_verdict_is_that_of_the_batch(
    before: int, after: int, answered: int, equal: bool
) -> None:
    audit = Audit()
    audit.ask(10, held(10))
    verdicts = [audit.record(seq, held(seq)) for seq in range(11, 11 + before)]
    theirs = held(10 + answered) if equal else Digest(0, 0)
    verdicts.append(audit.answer(10 + answered, theirs))
    verdicts += [audit.record(seq, held(seq)) for seq in range(11 + before, 11 + before + after)]
    known = 0 <= answered <= before + after
    assert [verdict for verdict in verdicts if verdict is not None] == ([equal] if known else [])
    assert (audit.asked_at is None) == known


def test_without_a_question_there_is_no_verdict() -> None:
    audit = Audit()
    assert audit.answer(1, held(1)) is None
    assert audit.record(1, held(1)) is None


def test_a_new_question_takes_the_place_of_the_last() -> None:
    audit = Audit()
    audit.ask(1, held(1))
    audit.answer(5, held(5))
    audit.ask(4, held(4))
    assert audit.record(5, Digest(0, 0)) is None
    assert audit.answer(4, held(4)) is True


def test_records_are_bounded() -> None:
    audit = Audit()
    audit.ask(0, held(0))
    for seq in range(1, 5000):
        audit.record(seq, held(seq))
    assert len(audit._own) <= 1024
    assert audit.answer(0, held(0)) is None
    assert audit.answer(4999, held(4999)) is True


def test_after_mismatches_it_is_due_less_often_until_one_agrees() -> None:
    audit = Audit()
    waits = []
    for _ in range(9):
        audit.ask(1, held(1))
        assert audit.answer(1, held(2)) is False
        waits.append(1)
        while not audit.is_due():
            waits[-1] += 1
    assert waits == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    assert audit.mismatches == 9
    audit.ask(1, held(1))
    assert audit.answer(1, held(1)) is True
    assert audit.is_due()
    assert audit.mismatches == 0
