"""Steps from the present fleet to the decided one, which are safe to repeat."""

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.planner.connectors.connector import Fleets
from kvmesh.planner.connectors.steps import Steps, reachable, steps_to
from kvmesh.planner.model import Action, Flip, RoleFleet, ScalingDecision

fleets = st.builds(RoleFleet, ready=st.integers(0, 12), starting=st.integers(0, 5), draining=st.integers(0, 3))
flips = st.none() | st.builds(Flip, to_role=st.sampled_from(["prefill", "decode"]), count=st.integers(0, 6))
decisions = st.builds(
    lambda prefill, decode, flip: ScalingDecision(
        at_s=0.0, loop="none", action=Action.SCALE, prefill=prefill, decode=decode, flip=flip
    ),
    st.integers(0, 15),
    st.integers(1, 15),
    flips,
)


def after(there: Fleets, steps: Steps) -> Fleets:
    """Carried out: those that flip start, and who is taken away was ready."""
    to_prefill = steps.flip if steps.flip_to == "prefill" else -steps.flip
    prefill, decode = turned(there.prefill, to_prefill), turned(there.decode, -to_prefill)
    return Fleets(prefill=scaled(prefill, steps.prefill), decode=scaled(decode, steps.decode))


def turned(fleet: RoleFleet, more: int) -> RoleFleet:
    if more >= 0:
        return RoleFleet(ready=fleet.ready, starting=fleet.starting + more)
    return RoleFleet(ready=fleet.ready + more, starting=fleet.starting)


def scaled(fleet: RoleFleet, count: int) -> RoleFleet:
    more = count - fleet.ordered
    if more >= 0:
        return RoleFleet(ready=fleet.ready, starting=fleet.starting + more)
    assert fleet.ready + more >= 0, "somebody who starts was taken away"
    return RoleFleet(ready=fleet.ready + more, starting=fleet.starting)


def all_ready(there: Fleets) -> Fleets:
    return Fleets(prefill=RoleFleet(ready=there.prefill.ordered), decode=RoleFleet(ready=there.decode.ordered))


@given(decisions, fleets, fleets, st.booleans(), st.booleans())
def test_counts_are_never_below_and_finally_as_asked(
    decision: ScalingDecision, prefill: RoleFleet, decode: RoleFleet, can_flip: bool, can_choose: bool
) -> None:
    there = Fleets(prefill=prefill, decode=decode)
    steps = steps_to(decision, there, name="x", can_flip=can_flip, can_choose=can_choose)
    there = after(there, steps)
    assert there.prefill.ordered >= decision.prefill
    assert there.decode.ordered >= decision.decode
    again = steps_to(decision, there, name="x", can_flip=can_flip, can_choose=can_choose)
    assert after(there, again) == there, "a second time nothing changes"
    last = steps_to(decision, all_ready(there), name="x", can_flip=can_flip, can_choose=can_choose)
    there = after(all_ready(there), last)
    assert (there.prefill.ordered, there.decode.ordered) == (decision.prefill, decision.decode)


@given(decisions, fleets, fleets)
def test_a_connector_that_cannot_flip_says_so(decision: ScalingDecision, prefill: RoleFleet, decode: RoleFleet) -> None:
    there = Fleets(prefill=prefill, decode=decode)
    could = steps_to(decision, there, name="stone", can_flip=True, can_choose=True)
    cannot = steps_to(decision, there, name="stone", can_flip=False, can_choose=True)
    assert cannot.flip == 0
    assert any("stone cannot turn" in note for note in cannot.notes) == (could.flip > 0)


def test_a_flip_takes_only_spare_workers() -> None:
    there = Fleets(prefill=RoleFleet(ready=4), decode=RoleFleet(ready=2))
    wanted = ScalingDecision(
        at_s=0.0, loop="none", action=Action.SCALE, prefill=3, decode=6, flip=Flip(to_role="decode", count=3)
    )
    steps = steps_to(wanted, there, name="x", can_flip=True, can_choose=True)
    assert (steps.flip_to, steps.flip, steps.prefill, steps.decode) == ("decode", 1, 3, 6)


def test_starting_workers_stay_beside_the_ready_ones_asked_for() -> None:
    assert reachable(RoleFleet(ready=1, starting=3), 1, can_choose=True) == 4
    assert reachable(RoleFleet(ready=3, starting=1), 2, can_choose=True) == 3
    assert reachable(RoleFleet(ready=3, starting=1), 2, can_choose=False) == 4
    assert reachable(RoleFleet(ready=3, draining=1), 2, can_choose=False) == 2
