"""A planner tells its last steps to the live page."""

import math

import msgspec

from kvmesh.planner.model import Action, Observation, Reason, RoleFleet, ScalingDecision, Traffic
from kvmesh.planner.told import ToldSteps, step_of
from kvmesh.protocol.messages import MAX_PLANNER_STEPS, PlannerSteps, RoleCount

SEEN = Observation(
    at_s=1.0,
    prefill=RoleFleet(ready=1),
    decode=RoleFleet(ready=2, starting=1),
    traffic=Traffic(start_s=0.0, end_s=2.0, requests=8.0, ttft_s=math.nan),
)
DECIDED = ScalingDecision(
    at_s=1.0,
    loop="reactive",
    action=Action.SCALE,
    prefill=1,
    decode=4,
    reasons=(Reason(code="queue", text="it grows"),),
)


def read(told: ToldSteps) -> PlannerSteps:
    return msgspec.json.decode(told.page(), type=PlannerSteps)


def test_a_step_says_what_came_and_what_is_ordered() -> None:
    told = ToldSteps()
    told.add(step_of(10.0, "active", SEEN, DECIDED, None, "no room"))
    [step] = read(told).steps
    assert step.decode == RoleCount(ready=2, starting=1, ordered=4)
    assert (step.requests_per_s, step.reasons, step.error) == (4.0, ("queue: it grows",), "no room")


def test_a_figure_that_is_not_known_is_no_number() -> None:
    assert step_of(10.0, "active", SEEN, DECIDED, None, "").ttft_s is None


def test_the_last_steps_are_kept() -> None:
    told = ToldSteps()
    for number in range(MAX_PLANNER_STEPS + 5):
        told.add(step_of(float(number), "active", None, DECIDED, None, ""))
    assert [step.ts_s for step in read(told).steps][:1] == [5.0]
    assert len(read(told).steps) == MAX_PLANNER_STEPS
