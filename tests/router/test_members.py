"""Workers that contradict each other are not used together."""

from msgspec.structs import replace

from protocol.ids import WorkerId
from protocol.messages import Role, WorkerCard
from protocol.model_files import ModelFile
from router.members import Members


def card(name: str, block_size: int = 16, context_tokens: int = 512, model: str = "m") -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(name), name=name, role=Role.DECODE, model=model, model_path="", address="",
        block_size=block_size, total_blocks=9, context_tokens=context_tokens,
    )  # fmt: skip


def test_workers_of_a_model_must_agree() -> None:
    members = Members()
    assert members.join(card("a"))
    assert members.join(card("b"))
    assert not members.join(card("c", block_size=32))
    assert not members.join(card("d", context_tokens=99))
    assert members.join(card("e", block_size=32, model="other"))


def test_a_contradicting_worker_joins_when_the_others_left() -> None:
    members = Members()
    members.join(card("a"))
    members.join(card("b"))
    members.join(card("c", block_size=32))
    members.join(card("d", block_size=64))
    assert members.leave(WorkerId("a")) == []
    assert members.leave(WorkerId("b")) == [card("c", block_size=32)]
    assert members.leave(WorkerId("c")) == [card("d", block_size=64)]


def test_a_worker_that_left_while_waiting_does_not_join() -> None:
    members = Members()
    members.join(card("a"))
    members.join(card("c", block_size=32))
    assert members.leave(WorkerId("c")) == []
    assert members.leave(WorkerId("a")) == []


def test_a_lone_worker_may_change_its_card() -> None:
    members = Members()
    members.join(card("a"))
    assert members.join(card("a", block_size=64))


def test_a_worker_with_another_tokenizer_waits() -> None:
    members = Members()
    one, other = ([ModelFile("tokenizer.json", 1, digit * 64)] for digit in "01")
    assert members.join(replace(card("a"), model_files=tuple(one)))
    assert not members.join(replace(card("b"), model_files=tuple(other)))
    assert members.join(card("of an earlier version"))
    assert [left.name for left in members.leave(WorkerId("a"))] == ["b"]
