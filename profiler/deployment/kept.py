"""Judge, from the planner's record, whether a deployment keeps its SLO and whether its profiles are right. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvmesh.planner.record import Record
from kvmesh.planner.slo import sentence_of
from kvmesh.protocol.profile import Profile

WRONG = 1.25  # a profile is wrong if observed times are that many times the profile's, or the profile's the observed
PLANS = 3  # in a row that must say so


@dataclass(frozen=True, slots=True)
class ProfileError:
    """Observed over profiled times, of prompts and of steps."""

    ttft: float
    itl: float

    @property
    def text(self) -> str:
        return f"the profile proves wrong: prompts take {self.ttft:.2f} times as long, steps {self.itl:.2f} times"


class DeploymentJudge:
    """Follows the records of a planner. It reports each SLO when its state changes, and a wrong profile once."""

    def __init__(self) -> None:
        self._kept: dict[str, bool] = {}
        self._last_s = 0.0
        self._wrong = 0
        self._told: ProfileError | None = None
        self.error: ProfileError | None = None  # set while a plan with corrected profiles is due

    def hear(self, records: Sequence[Record]) -> Iterator[str]:
        """Yield what is worth telling about the records that are new."""
        for record in records:
            if record.ts_s <= self._last_s:
                continue
            self._last_s = record.ts_s
            yield from self._of_slo(record)
            if record.decision.loop == "predictive":
                yield from self._of_profile(record)

    def _of_slo(self, record: Record) -> Iterator[str]:
        for state in record.slo:
            if state.is_kept is not None and self._kept.get(state.of) is not state.is_kept:
                self._kept[state.of] = state.is_kept
                yield sentence_of(state)

    def _of_profile(self, record: Record) -> Iterator[str]:
        decision = record.decision
        found = ProfileError(decision.ttft_correction, decision.itl_correction)
        before = self._told or ProfileError(1.0, 1.0)
        is_wrong = max(_apart(found.ttft, before.ttft), _apart(found.itl, before.itl)) >= WRONG
        self._wrong = self._wrong + 1 if is_wrong else 0
        if self._wrong >= PLANS:
            self._wrong, self._told, self.error = 0, found, found
            yield found.text

    @property
    def has_kept_all(self) -> bool:
        """Return whether every SLO that could be judged is kept now, and one could be."""
        return bool(self._kept) and all(self._kept.values())


def _apart(one: float, other: float) -> float:
    return max(one / other, other / one)


def corrected_profile(profile: Profile, error: ProfileError) -> Profile:
    """Return the profile with the times that were observed."""
    prefill, decode = profile.prefill, profile.decode
    if prefill is not None:
        prefill = replace(prefill, ttft_s=[error.ttft * time_s for time_s in prefill.ttft_s])
    if decode is not None:
        decode = replace(decode, itl_s=[[error.itl * time_s for time_s in row] for row in decode.itl_s])
    return replace(profile, prefill=prefill, decode=decode, notes=f"{profile.notes}; {error.text}".lstrip("; "))
