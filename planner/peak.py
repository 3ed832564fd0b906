"""Use what a fleet was planned for: the workers that the highest expected load takes. Pure.

Nobody can foresee the first burst of a load. But whoever deploys a fleet often knows how high the load gets: from the
traffic of a deployment request, or from the highest minutes of the last weeks. The planner then need not guess how far
a burst goes, and keeps a fleet that starts at its full size until the peak has had time to come.
"""

from kvmesh.planner.budget import Counts, least_of, most_of
from kvmesh.planner.model import PlannerConfig, Reason, reason
from kvmesh.protocol.errors import ConfigError

EXCEEDED_S = 300.0  # a load above the expected one that lasts so long shows that the expectation is wrong
KNOWN = 0.9  # share of that time whose traffic must be known: pieces end when they end, and some are missing


class ExpectedPeak:
    """The fleet for the highest expected load. The planner orders no more unless a load has lasted that takes more."""

    def __init__(self, config: PlannerConfig) -> None:
        """Take the counts of the settings. Raise ConfigError if one of two roles has none."""
        is_aggregated = config.mode == "aggregated"
        if not is_aggregated and bool(config.peak_prefill) != bool(config.peak_decode):
            raise ConfigError(
                f"peak_prefill is {config.peak_prefill} and peak_decode is {config.peak_decode}",
                hint="set both, as `kvmesh profile plan` says, or none",
            )
        self.is_known = config.predictive and config.peak_decode > 0
        self.fleet = Counts(0 if is_aggregated else config.peak_prefill, config.peak_decode)
        self._held = Counts(0, 0)
        self._held_until_s = 0.0
        self._short_since_s: float | None = None  # the whole fleet is ready, and more is asked for

    def begin(self, ordered: Counts, until_s: float) -> None:
        """Hold what is ordered of the fleet until then: a planner that has just started has not seen the peak yet."""
        self._held, self._held_until_s = self.limited(ordered), until_s

    def held(self, at_s: float) -> Counts:
        """Return the workers that stay although no load has needed them so far."""
        return self._held if self.is_known and at_s < self._held_until_s else Counts(0, 0)

    def limited(self, counts: Counts) -> Counts:
        """Return the counts, none above that of the fleet for the peak."""
        return least_of(counts, self.fleet) if self.is_known else counts

    def hear(self, needed: Counts, known_s: float) -> tuple[Reason, ...]:
        """Take what the mean load of the last `known_s` needs. A load above the peak that lasts becomes the peak."""
        if not self.is_known or known_s < KNOWN * EXCEEDED_S or needed == least_of(needed, self.fleet):
            return ()
        return (self._raised(needed, f"the load of the last {known_s:.0f} s"),)

    def press(self, pressed: Counts, ready: Counts, at_s: float) -> tuple[Reason, ...]:
        """Take what queues and arrivals ask for while these workers are ready.

        If the whole fleet has been too small for so long, its workers are slower than was planned, or the load higher.
        """
        is_short = pressed != least_of(pressed, self.fleet) and self.fleet == least_of(self.fleet, ready)
        if not self.is_known or not is_short:
            self._short_since_s = None
            return ()
        if self._short_since_s is None:
            self._short_since_s = at_s
        if at_s - self._short_since_s < EXCEEDED_S:
            return ()
        self._short_since_s = None
        return (self._raised(pressed, f"what queues and arrivals ask for since {EXCEEDED_S:.0f} s"),)

    def _raised(self, needed: Counts, what: str) -> Reason:
        before, self.fleet = self.fleet, most_of(needed, self.fleet)
        text = (
            f"{what} takes {needed.prefill} prefill and {needed.decode} decode workers, the highest expected load "
            f"{before.prefill} and {before.decode}: raise peak_prefill and peak_decode"
        )
        return reason("peak-exceeded", text)
