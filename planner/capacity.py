"""Say how many workers a load takes, from their profiles and what was observed of them. Pure.

This is the one place that knows both kinds of fleets: prefill and decode workers, or workers that do both halves.
"""

from kvmesh.planner.aggregated import aggregated_need, both_halves
from kvmesh.planner.correction import Corrections, corrected, corrected_aggregated
from kvmesh.planner.costs import Horizon
from kvmesh.planner.history import RecentTraffic, TrafficWindow
from kvmesh.planner.model import Observation, PlannerConfig
from kvmesh.planner.reactive import (
    NO_PRESSURE,
    Pressure,
    Rules,
    aggregated_pressure,
    decode_pressure,
    prefill_pressure,
)
from kvmesh.planner.sizing import Demand, Need, Slo, check_tables, decode_need, prefill_need
from kvmesh.protocol.profile import Profile


class FleetCapacity:
    """The profiles of a fleet's workers, corrected by what was observed."""

    def __init__(self, config: PlannerConfig, prefill: Profile, decode: Profile) -> None:
        """Raise ConfigError if a profile lacks the table of its role, or if the two do not fit together."""
        check_tables(prefill, decode)
        self.is_aggregated = config.mode == "aggregated"
        if self.is_aggregated:
            prefill = decode = both_halves(prefill, decode)
        self._prefill, self._decode = prefill, decode
        self._slo = Slo(config.ttft_slo_s, config.itl_slo_s)
        self._utilization = config.target_utilization
        self.gpus = (prefill.gpus, decode.gpus)
        self.corrections = Corrections()

    def correct(self, window: TrafficWindow, demand: Demand, seen: Observation) -> None:
        """Compare the latencies of an interval with those that the profiles let expect."""
        before, requests = self.corrections, window.requests
        if self.is_aggregated:
            _, itl_s = window.observed
            self.corrections = corrected_aggregated(before, self._decode, demand, requests, seen.decode.ready, itl_s)
            return
        workers = (seen.prefill.ready, seen.decode.ready)
        profiles = (self._prefill, self._decode)
        self.corrections = corrected(before, profiles, demand, requests, workers, window.observed)

    def needs(self, demand: Demand) -> dict[str, Need]:
        """Return the workers that the demand takes, by role."""
        return self._needs(demand, self.corrections)

    def uncorrected(self, demand: Demand) -> dict[str, Need]:
        """Return the workers that the demand takes if the profiles are right."""
        return self._needs(demand, Corrections())

    def _needs(self, demand: Demand, corrections: Corrections) -> dict[str, Need]:
        slo, share = self._slo, self._utilization
        if self.is_aggregated:
            return {"aggregated": aggregated_need(self._decode, demand, slo, share, corrections.itl)}
        return {
            "prefill": prefill_need(self._prefill, demand, slo, share, corrections.ttft),
            "decode": decode_need(self._decode, demand, slo, share, corrections.itl),
        }

    def pressures(
        self, seen: Observation, recent: RecentTraffic | None, horizon: Horizon | None
    ) -> tuple[Pressure, Pressure]:
        """Return what queues and recent arrivals ask for, of prefill and of decode workers."""
        decode_rules = Rules(self._decode, self._slo, self._utilization, self.corrections.itl, horizon)
        if self.is_aggregated:
            return NO_PRESSURE, aggregated_pressure(decode_rules, seen.decode, seen.decode_loads, recent)
        prefill_rules = Rules(self._prefill, self._slo, self._utilization, self.corrections.ttft, horizon)
        prefill = prefill_pressure(prefill_rules, seen.prefill, seen.prefill_loads, recent)
        return prefill, decode_pressure(decode_rules, seen.decode, seen.decode_loads, recent)
