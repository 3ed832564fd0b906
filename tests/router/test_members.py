"""Workers that contradict each other are not used together."""

from msgspec.structs import replace

from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Role, WorkerCard
from kvmesh.protocol.model_files import ModelFile
from kvmesh.router.members import Members


def card(name: str, block_size: int = 16, context_tokens: int = 512, model: str = "m") -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(name), name=name, role=Role.DECODE, model=model, model_path="", address="",
        block_size=block_size, total_blocks=9, context_tokens=context_tokens,
    )  # fmt: skip


def join(members: Members, *cards: WorkerCard) -> list[str]:
    """Return the names of the workers that have joined with the last card."""
    *_, changes = [members.join(card) for card in cards]
    return [joined.name for joined in changes.joined]


def leave(members: Members, name: str) -> list[str]:
    return [joined.name for joined in members.leave(WorkerId(name)).joined]


def test_workers_of_a_model_must_agree() -> None:
    members = Members()
    assert join(members, card("a")) == ["a"]
    assert join(members, card("b")) == ["b"]
    assert join(members, card("c", block_size=32)) == []
    assert join(members, card("d", context_tokens=99)) == []
    assert join(members, card("e", block_size=32, model="other")) == ["e"]


def test_a_contradicting_worker_joins_when_the_others_left() -> None:
    members = Members()
    join(members, card("a"), card("b"), card("c", block_size=32), card("d", block_size=64))
    assert leave(members, "a") == []
    assert leave(members, "b") == ["c"]
    assert leave(members, "c") == ["d"]


def test_one_worker_with_wrong_settings_does_not_lock_out_the_others() -> None:
    members = Members()
    assert join(members, card("wrong", block_size=1)) == ["wrong"]
    assert join(members, card("a")) == [], "one against one: the first stays"
    changes = members.join(card("b"))
    assert [joined.name for joined in changes.joined] == ["a", "b"]
    assert [gone.name for gone in changes.put_aside] == ["wrong"]
    assert "block size is 1, that of the other workers of its model 16" in members.conflict(card("wrong", block_size=1))


def test_the_larger_group_takes_over_while_workers_are_replaced() -> None:
    members = Members()
    join(members, *(card(f"old-{n}") for n in range(3)), *(card(f"new-{n}", block_size=32) for n in range(2)))
    assert leave(members, "old-0") == [], "as many of each: nothing changes"
    assert leave(members, "old-1") == ["new-0", "new-1"]


def test_a_worker_that_left_while_waiting_does_not_join() -> None:
    members = Members()
    join(members, card("a"), card("c", block_size=32))
    assert leave(members, "c") == []
    assert leave(members, "a") == []


def test_a_lone_worker_may_change_its_card() -> None:
    members = Members()
    assert join(members, card("a"), card("a", block_size=64)) == ["a"]


def test_a_worker_that_changes_its_card_against_the_others_is_put_aside() -> None:
    members = Members()
    join(members, card("a"), card("b"), card("c"))
    assert members.join(card("a", block_size=64)).put_aside == [card("a", block_size=64)]


def test_a_worker_with_another_tokenizer_waits() -> None:
    members = Members()
    one, other = ([ModelFile("tokenizer.json", 1, digit * 64)] for digit in "01")
    assert join(members, replace(card("a"), model_files=tuple(one))) == ["a"]
    assert join(members, replace(card("b"), model_files=tuple(other))) == []
    assert join(members, card("of an earlier version")) == ["of an earlier version"]
    assert leave(members, "a") == ["b"]
