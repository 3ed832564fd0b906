"""Tests of the decision which cards of Kubernetes count."""

import pytest

from kvmesh.mesh.discovery.kubernetes import view as module
from kvmesh.mesh.discovery.kubernetes.objects import CardOwner, MeshCard, MeshPod, UnreadableCard
from kvmesh.mesh.discovery.kubernetes.view import RETURN_S, PodView

LABEL = "kvmesh.dev/mesh=m"


def card(key: str, pod: str = "p", value: bytes = b"1") -> MeshCard:
    return MeshCard(f"card-{key}", key, value, CardOwner(pod, f"uid-{pod}" if pod else ""))


def pod(name: str = "p", *, is_ready: bool = True, is_leaving: bool = False) -> MeshPod:
    return MeshPod(name, f"uid-{name}", is_ready, is_leaving)


def view(cards: list[MeshCard | UnreadableCard], pods: list[MeshPod]) -> PodView:
    made = PodView(LABEL)
    made.on_cards(cards, 0.0)
    made.on_pods(pods)
    return made


def test_cards_of_ready_pods_count() -> None:
    seen = view([card("a"), card("b", "q")], [pod(), pod("q", is_ready=False)])
    assert (seen.present(), seen.lapsed()) == ({"a": b"1"}, frozenset())


@pytest.mark.parametrize(
    ("pods", "reason"),
    [
        ([pod(is_ready=False)], "its pod p is not ready"),
        ([pod(is_leaving=True)], "its pod p is being deleted"),
        ([], f"its pod p is gone, or has not the label {LABEL}"),
    ],
)
def test_a_card_that_does_not_count_has_a_reason(pods: list[MeshPod], reason: str) -> None:
    seen = view([card("a")], pods)
    assert (seen.present(), seen.ignored()) == ({}, (("a", reason),))


def test_what_is_no_card_has_a_reason() -> None:
    seen = view([card("a", ""), UnreadableCard("card-x", "its object cannot be read")], [pod()])
    assert seen.ignored() == (
        ("a", "no pod owns its card"),
        ("meshcards/card-x", "its object cannot be read"),
        ("pods/p", "is ready and has put no card"),
    )


def test_a_pod_that_is_not_ready_makes_its_cards_lapse() -> None:
    seen = view([card("a"), card("b")], [pod()])
    seen.on_pod(pod(is_ready=False))
    assert (seen.present(), seen.lapsed()) == ({}, {"a", "b"})
    seen.on_pod(pod())
    assert (set(seen.present()), seen.lapsed()) == ({"a", "b"}, frozenset())


def test_a_pod_that_is_being_deleted_withdraws_its_cards() -> None:
    seen = view([card("a")], [pod()])
    seen.on_pod(pod(is_ready=False, is_leaving=True))
    seen.on_pod_gone("uid-p")
    assert (seen.present(), seen.lapsed()) == ({}, frozenset())


def test_a_pod_that_is_gone_makes_its_cards_lapse() -> None:
    seen = view([card("a")], [pod()])
    seen.on_pod_gone("uid-p")
    assert seen.lapsed() == {"a"}


def test_a_pod_of_the_same_name_is_another_one() -> None:
    seen = view([card("a")], [MeshPod("p", "uid-new", True, False)])
    assert seen.present() == {}


def test_an_empty_card_is_withdrawn_and_a_removed_one_lapsed() -> None:
    seen = view([card("a"), card("b")], [pod()])
    seen.on_card(card("a", value=b""))
    seen.on_card_gone("card-a")
    seen.on_card_gone("card-b")
    assert (seen.present(), seen.lapsed()) == ({}, {"b"})


def test_a_card_that_can_no_longer_be_read_lapses() -> None:
    seen = view([card("a")], [pod()])
    seen.on_card(UnreadableCard("card-a", "somebody has edited it"))
    assert (seen.present(), seen.lapsed()) == ({}, {"a"})
    seen.on_card(card("a"))
    assert (seen.present(), seen.ignored()) == ({"a": b"1"}, ())


def test_a_card_goes_with_its_new_owner() -> None:
    seen = view([card("a")], [pod(), pod("q", is_ready=False)])
    seen.on_card(card("a", "q"))
    assert seen.lapsed() == {"a"}
    seen.on_pod(pod("q"))
    seen.on_pod(pod("p", is_ready=False))
    assert seen.present() == {"a": b"1"}


def test_a_card_that_a_list_lacks_gives_its_owner_time_to_return() -> None:
    seen = view([card("a")], [pod()])
    seen.on_cards([], 100.0)
    seen.on_time(100.0 + RETURN_S - 0.1)
    assert seen.present() == {"a": b"1"}
    seen.on_time(100.0 + RETURN_S)
    assert seen.lapsed() == {"a"}


def test_no_card_lapses_while_the_server_is_away() -> None:
    seen = view([card("a")], [pod()])
    seen.on_cards([], 100.0)
    seen.on_away()
    seen.on_time(1000.0)
    assert seen.present() == {"a": b"1"}


def test_a_pod_that_went_while_nobody_watched_makes_its_cards_lapse() -> None:
    seen = view([card("a"), card("b", "q")], [pod(), pod("q")])
    seen.on_pods([pod("q")])
    assert (seen.present(), seen.lapsed()) == ({"b": b"1"}, {"a"})


def test_more_cards_than_a_mesh_has_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CARDS", 2)
    seen = view([card("a"), card("b"), card("c")], [pod()])
    assert set(seen.present()) == {"a", "b"}
    assert seen.ignored() == (("meshcards/card-c", "there are more than 2 cards"),)


def test_many_reasons_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IGNORED", 3)
    assert len(view([card(f"{n}") for n in range(9)], []).ignored()) == 3
