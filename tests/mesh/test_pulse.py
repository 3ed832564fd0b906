"""Test when a peer is asked for a sign of life, and when it is given up."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.mesh.plane.pulse import CALM, HASTY, Act, Pulse, SilenceLimits


class Peer:
    """A pulse, and a peer that sends what the test says. The time moves by ticks."""

    def __init__(self, patience: SilenceLimits = HASTY) -> None:
        self.patience = patience
        self.pulse = Pulse()
        self.now_s = 100.0
        self.acts: list[tuple[float, Act]] = []
        self.pulse.begin(self.now_s)

    def run(self, for_s: float, *, sends_bytes: int = 0, answers: bool = False, late_s: float = 0.0) -> None:
        """Pass the time; the peer sends so much in each tick, and answers questions after `late_s`."""
        due_s = [at_s + late_s for at_s, act in self.acts[-1:] if act is Act.ASK and answers]
        end_s = self.now_s + for_s
        while self.now_s < end_s - 1e-9:
            self.now_s += self.patience.tick_s
            self.pulse.heard_bytes += sends_bytes
            while due_s and due_s[0] <= self.now_s:
                due_s.pop(0)
                self.pulse.heard_bytes += 5
                self.pulse.answered()
            act = self.pulse.look(self.patience, self.now_s)
            if act is not Act.NOTHING:
                self.acts.append((self.now_s, act))
            if act is Act.ASK and answers:
                due_s.append(self.now_s + late_s)

    @property
    def given_up_s(self) -> float | None:
        return next((at_s for at_s, act in self.acts if act is Act.GIVE_UP), None)

    @property
    def questions(self) -> int:
        return sum(act is Act.ASK for _, act in self.acts)


def test_a_peer_that_answers_is_kept_for_ever() -> None:
    peer = Peer()
    peer.run(600, answers=True)
    assert peer.given_up_s is None
    assert peer.questions <= 600 / HASTY.ask_s * 2


@given(st.floats(0.0, 5.0))
def test_a_peer_that_falls_silent_is_given_up_within_two_and_a_half_seconds(after_s: float) -> None:
    peer = Peer()
    peer.run(after_s, sends_bytes=100, answers=True)
    began_s = peer.now_s
    peer.run(3.0)
    assert peer.given_up_s is not None
    assert 1.9 < peer.given_up_s - began_s <= 2.5


@given(st.floats(0.0, 5.0))
def test_a_peer_that_hears_nothing_is_given_up_although_it_sends(after_s: float) -> None:
    peer = Peer()
    peer.run(after_s, sends_bytes=100, answers=True)
    began_s = peer.now_s
    peer.run(4.0, sends_bytes=1000)
    assert peer.given_up_s is not None
    assert peer.given_up_s - began_s <= 3.25


def test_a_hang_of_a_second_and_a_half_is_borne() -> None:
    peer = Peer()
    peer.run(3.0, sends_bytes=100, answers=True)
    peer.run(1.5)
    peer.run(3.0, sends_bytes=100, answers=True)
    assert peer.given_up_s is None


def test_a_busy_peer_gets_more_time() -> None:
    peer = Peer()
    peer.run(20.0, answers=True, late_s=1.5)
    began_s = peer.now_s
    peer.run(3.0)
    assert peer.given_up_s is None, "it has answered after 1.5 s each time"
    peer.run(2.0)
    assert peer.given_up_s is not None and peer.given_up_s > began_s + 2.5


def test_a_peer_that_was_slow_once_is_soon_asked_as_before() -> None:
    peer = Peer()
    peer.run(20.0, answers=True, late_s=1.5)
    peer.run(5.0, sends_bytes=100, answers=True)
    began_s = peer.now_s
    peer.run(4.0)
    assert peer.given_up_s is not None and peer.given_up_s - began_s <= 2.5


def test_an_answer_behind_many_bytes_may_be_late() -> None:
    peer = Peer()
    peer.run(10.0, sends_bytes=HASTY.backlog_bytes)
    assert peer.given_up_s is None


def test_time_in_which_this_process_stood_still_does_not_count() -> None:
    peer = Peer()
    peer.run(3.0, sends_bytes=100, answers=True)
    peer.pulse.heard_bytes = 0
    assert peer.pulse.look(HASTY, peer.now_s + 60.0) is not Act.GIVE_UP


@pytest.mark.parametrize("patience", [CALM, dataclasses.replace(CALM, tick_s=1.0)])
def test_calls_that_cannot_go_elsewhere_bear_fifteen_seconds(patience: SilenceLimits) -> None:
    peer = Peer(patience)
    began_s = peer.now_s
    peer.run(14.0)
    assert peer.given_up_s is None
    peer.run(12.0)
    assert peer.given_up_s is not None and peer.given_up_s - began_s <= 20.0
