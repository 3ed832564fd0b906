"""`kvmesh workers`: what is typed, and what is shown."""

import io

import pytest
from rich.console import Console

from kvmesh.commands.workers import ACTIONS, asked_for, table_of
from kvmesh.frontend.crew import CrewMember
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import ControlAction, Role, WorkerStatus


def test_every_action_is_one_of_the_workers() -> None:
    assert {sent for sent, _ in ACTIONS.values()} <= {action.value for action in ControlAction}


def test_words_become_an_action() -> None:
    worker, control = asked_for(["role", "d1", "prefill"])
    assert (worker, control.action, control.arguments) == ("d1", "set_role", {"role": "prefill"})
    assert asked_for(["drain", "all"])[1].arguments == {}
    assert asked_for(["reset-cache", "all"])[1].arguments == {}
    assert asked_for(["reset-cache", "all", "host,disk"])[1].arguments == {"tiers": "host,disk"}


@pytest.mark.parametrize("words", [["juggle"], ["drain"], ["role", "d1"], ["drain", "d1", "d2"]])
def test_words_that_mean_nothing_get_the_way_to_write_them(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="write kvmesh workers"):
        asked_for(words)


def test_the_table_says_who_does_not_answer() -> None:
    def member(name: str, status: WorkerStatus | None) -> CrewMember:
        return CrewMember(
            id=WorkerId(name),
            name=name,
            model="m",
            role=Role.DECODE,
            address="",
            pid=1,
            resting="",
            status=status,
            problem="" if status else "gone",
        )

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table_of([member("a", WorkerStatus(state="drained", is_profiling=True)), member("b", None)]))
    shown = console.export_text()
    assert "drained, profiled" in shown and "no answer: gone" in shown
