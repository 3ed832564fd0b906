"""Tests of the decision which of our cards have to be written."""

import math

import pytest

from kvmesh.mesh.discovery.kubernetes.objects import CardOwner, MeshCard, name_of
from kvmesh.mesh.discovery.kubernetes.own_cards import REPAIR_S, DeleteCard, OwnCards, WriteCard

US = CardOwner("p", "uid-p", "main", "run-2")


def own(*, cleans_up: bool = True) -> OwnCards:
    return OwnCards("m", US, lambda: 0.5, cleans_up)


def written(value: bytes = b"1") -> OwnCards:
    cards = own()
    cards.put("a", value, 0.0)
    assert cards.due(0.0) == WriteCard("a", value)
    cards.on_done(WriteCard("a", value), "r1")
    return cards


def seen(value: bytes = b"1", owner: CardOwner = US, key: str = "a") -> MeshCard:
    return MeshCard(name_of("m", key), key, value, owner)


def test_a_card_is_written_once() -> None:
    cards = written()
    assert (cards.due(1000.0), cards.due_s()) == (None, math.inf)
    cards.put("a", b"1", 1000.0)
    assert cards.due(1000.0) is None


def test_a_new_value_is_written() -> None:
    cards = written()
    cards.put("a", b"2", 5.0)
    assert cards.due(5.0) == WriteCard("a", b"2")


def test_a_card_is_emptied_before_it_is_deleted() -> None:
    cards = written()
    cards.put("a", b"", 5.0)
    assert cards.due(5.0) == WriteCard("a", b"")
    cards.on_done(WriteCard("a", b""), "r2")
    assert not cards.is_settled("a")
    assert cards.due(5.0) == DeleteCard("a", "r2")
    cards.on_done(DeleteCard("a", "r2"))
    assert (cards.is_settled("a"), cards.due(5.0)) == (True, None)


def test_a_value_that_comes_during_a_write_is_not_lost() -> None:
    cards = own()
    cards.put("a", b"1", 0.0)
    order = cards.due(0.0)
    cards.put("a", b"2", 0.1)
    assert order is not None
    cards.on_done(order, "r1")
    assert cards.due(0.1) == WriteCard("a", b"2")


def test_a_card_that_is_put_again_while_it_is_withdrawn_stays() -> None:
    cards = written()
    cards.put("a", b"", 5.0)
    cards.on_done(WriteCard("a", b""), "r2")
    order = cards.due(5.0)
    cards.put("a", b"3", 5.1)
    assert order is not None
    cards.on_done(order)
    assert cards.due(5.1) == WriteCard("a", b"3")


def test_what_was_never_written_needs_no_withdrawal() -> None:
    cards = own()
    cards.put("a", b"1", 0.0)
    cards.put("a", b"", 0.1)
    assert cards.due(0.1) is None


def test_failures_are_tried_again_after_growing_waits() -> None:
    cards = own()
    cards.put("a", b"1", 0.0)
    waits, now_s = [], 0.0
    for _ in range(9):
        order = cards.due(now_s)
        assert order is not None
        cards.on_failure(order, now_s)
        waits.append(cards.due_s() - now_s)
        now_s = cards.due_s()
    assert waits == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 60, 60])


def test_a_card_that_is_taken_away_is_written_again_at_most_once_a_minute() -> None:
    cards = written()
    times = []
    for _ in range(3):
        cards.on_gone(name_of("m", "a"), 100.0)
        times.append(cards.due_s())
        cards.on_done(WriteCard("a", b"1"), "r")
    assert times == pytest.approx([100.5, 100.5 + REPAIR_S, 100.5 + 2 * REPAIR_S])


def test_a_list_without_our_card_has_it_written() -> None:
    cards = written()
    cards.on_cards([seen()], 50.0)
    assert cards.due_s() == math.inf
    cards.on_cards([], 100.0)
    assert cards.due(101.0) == WriteCard("a", b"1")


def test_a_card_that_somebody_has_emptied_is_written_again() -> None:
    cards = written()
    cards.on_card(seen(b""), 100.0)
    assert cards.due(101.0) == WriteCard("a", b"1")


def test_our_own_withdrawal_is_no_theft() -> None:
    cards = written()
    cards.put("a", b"", 5.0)
    cards.on_done(WriteCard("a", b""), "r2")
    cards.on_card(seen(b""), 5.1)
    cards.on_gone(name_of("m", "a"), 5.2)
    assert cards.due(100.0) == DeleteCard("a", "r2")


def test_another_pod_with_our_key_is_told_once_and_not_fought() -> None:
    cards = written()
    other = seen(b"2", CardOwner("q", "uid-q"))
    assert [cards.on_card(other, 1.0), cards.on_card(other, 2.0)] == ["q", ""]
    assert cards.due_s() == math.inf
    cards.put("a", b"", 3.0)
    assert cards.due(3.0) is None, "the card of another is not withdrawn"


def test_what_an_earlier_run_of_our_container_left_is_withdrawn() -> None:
    cards = own()
    cards.on_card(seen(b"old", CardOwner("p", "uid-p", "main", "run-1"), "workers/old"), 0.0)
    assert cards.due(0.0) == WriteCard("workers/old", b"")
    cards.on_done(WriteCard("workers/old", b""), "r9")
    assert cards.due(0.0) == DeleteCard("workers/old", "r9")


@pytest.mark.parametrize(
    "owner",
    [
        CardOwner("p", "uid-p", "main", "run-2"),  # another process of this start of the container
        CardOwner("p", "uid-p", "sidecar", "run-1"),
        CardOwner("q", "uid-q", "main", "run-1"),
    ],
)
def test_cards_of_others_stay(owner: CardOwner) -> None:
    cards = own()
    cards.on_card(seen(b"old", owner, "workers/old"), 0.0)
    assert cards.due(0.0) is None


def test_nothing_is_removed_where_the_container_is_not_known() -> None:
    cards = own(cleans_up=False)
    cards.on_card(seen(b"old", CardOwner("p", "uid-p", "main", "run-1"), "workers/old"), 0.0)
    assert cards.due(0.0) is None


def test_a_refused_card_is_forgotten() -> None:
    cards = own()
    cards.put("a", b"1", 0.0)
    cards.on_refused(WriteCard("a", b"1"))
    assert (cards.due(1.0), cards.keys()) == (None, [])
