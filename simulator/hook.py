"""The planner in the loop."""

from collections.abc import Callable
from dataclasses import dataclass

from planner.model import Observation, ScalingDecision


@dataclass(frozen=True, slots=True)
class PlannerHook:
    """`decide` is asked every `interval_s` of simulated time; its decision is carried out at once.

    It is told a Traffic of the last `traffic_s` (a multiple of interval_s) when these have passed, and None between.
    """

    decide: Callable[[Observation], ScalingDecision]
    interval_s: float = 5.0
    traffic_s: float = 60.0
