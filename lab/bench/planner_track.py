"""Track what a policy saw, expected and ordered while a load was simulated, and turn it into curves. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvmesh.lab.bench.planner_policies import Decide
from kvmesh.planner.model import Observation, PeakForecast, ScalingDecision

MOST_POINTS = 600  # of a curve
LEAST_BIN_S = 60.0  # counts of arrivals over less are mostly chance

T = TypeVar("T")
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Moment:
    """Hold one observation and the decision that followed it."""

    at_s: float
    requests: float
    ordered: tuple[int, int]  # prefill, decode
    ready: tuple[int, int]
    peak: PeakForecast | None


@dataclass(frozen=True, slots=True)
class ChartCurve:
    label: str
    points: Sequence[Point]
    is_stepped: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Hold curves over the same time, with at most one band between two values."""

    title: str
    curves: Sequence[ChartCurve]
    band: Sequence[tuple[float, float, float]] = ()  # at_s, low, high
    band_label: str = ""

    @property
    def most(self) -> float:
        """Return the highest value, at least 1."""
        values = [value for curve in self.curves for _, value in curve.points]
        return max([1.0, *values, *(high for _, _, high in self.band)])


class PlannerTrack:
    """Remembers each moment of a policy."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []

    def watch(self, decide: Decide) -> Decide:
        """Return the policy, watched."""

        def watched(seen: Observation) -> ScalingDecision:
            decision = decide(seen)
            self.moments.append(
                Moment(
                    at_s=seen.at_s,
                    requests=0.0 if seen.traffic is None else seen.traffic.requests or 0.0,
                    ordered=(decision.prefill, decision.decode),
                    ready=(seen.prefill.ready, seen.decode.ready),
                    peak=decision.peak,
                )
            )
            return decision

        return watched

    def charts(self) -> list[Chart]:
        """Return the load with the forecast, and the workers of each role."""
        return [self._load(), self._workers("prefill", 0), self._workers("decode", 1)]

    def _load(self) -> Chart:
        load = ChartCurve("load", self._rates(), is_stepped=True)
        peaks = thinned([(moment.at_s, moment.peak) for moment in self.moments if moment.peak is not None])
        if not peaks:
            return Chart("requests/s", [load])
        return Chart(
            "requests/s",
            [
                load,
                ChartCurve("forecast", [(at_s + peak.horizon_s, peak.likely_rps) for at_s, peak in peaks]),
                ChartCurve("ready for", [(at_s + peak.horizon_s, peak.ready_rps) for at_s, peak in peaks]),
            ],
            [(at_s + peak.horizon_s, peak.low_rps, peak.high_rps) for at_s, peak in peaks],
            "8 of 10 cases",
        )

    def _workers(self, role: str, place: int) -> Chart:
        moments = thinned(self.moments)
        ordered = [(moment.at_s, float(moment.ordered[place])) for moment in moments]
        ready = [(moment.at_s, float(moment.ready[place])) for moment in moments]
        return Chart(f"{role} workers", [ChartCurve("ordered", ordered, True), ChartCurve("ready", ready, True)])

    def _rates(self) -> list[Point]:
        """Return the observed rate in pieces that are long enough to show more than chance."""
        if not self.moments:
            return []
        bin_s = max(LEAST_BIN_S, self.moments[-1].at_s / MOST_POINTS)
        rates: list[Point] = []
        since_s = requests = 0.0
        for moment in self.moments:
            requests += moment.requests
            if moment.at_s - since_s >= bin_s - 1e-6:
                rates.append((since_s, requests / (moment.at_s - since_s)))
                since_s, requests = moment.at_s, 0.0
        return rates


def thinned(items: Sequence[T]) -> Sequence[T]:
    """Return at most MOST_POINTS of the items, at even distances, with the last."""
    step = -(-len(items) // MOST_POINTS) or 1
    return items[::-1][::step][::-1]
