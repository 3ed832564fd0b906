"""Decide whether what processes hold stays flat. Pure: samples in, slopes and a verdict out.

Each process is looked at from its start to its end. Caches, pools and tables fill at first, so the first part of a life
does not count. After that a line is laid through the samples, and the middle of the last third is compared with the
middle of the first: what goes up and down with the load is no growth.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import Struct

WARM_SHARE = 0.35  # of a life, in which caches fill
WARM_S = 60.0  # ... but not less, where the life is long enough
LEAST_SAMPLES = 9
LEAST_LIFE_S = 30.0  # of a process that says anything about growth
GROWTH: Mapping[str, float] = {  # that is no leak, over the part of a life that counts
    "rss_mib": 8.0,
    "fds": 12,
    "threads": 2,
    "tasks": 16,
    "shm_files": 4,
    "shm_mib": 4.0,
}
MOST_GC_PAUSE_MS = 20.0


class SizeSample(Struct, frozen=True):
    """The sizes of a process at one moment. `shm` counts what it maps of /dev/shm."""

    at_s: float
    rss_mib: float
    fds: int
    threads: int
    tasks: int
    shm_files: int = 0
    shm_mib: float = 0.0
    gc_pause_ms: float = 0.0  # the longest so far, in CPU time of its thread


class Slope(Struct, frozen=True):
    """The way of one number of one process. `growth`: of the middle of the last third over that of the first."""

    first: float
    last: float
    most: float
    per_hour: float
    growth: float
    is_flat: bool


class ProcessLife(Struct, frozen=True):
    """One process from its start to its end, and how its numbers went; none if the life was too short to say."""

    name: str
    pid: int
    began_s: float
    seconds: float
    slopes: dict[str, Slope]
    gc_pause_ms: float = 0.0  # the longest pause for garbage, in CPU time of its thread

    @property
    def growing(self) -> list[str]:
        return [name for name, slope in self.slopes.items() if not slope.is_flat]


def life_of(name: str, pid: int, samples: Sequence[SizeSample]) -> ProcessLife:
    """Return how the numbers of one process went."""
    began_s, ended_s = samples[0].at_s, samples[-1].at_s
    counted = counted_part(samples)
    slopes = {} if len(counted) < LEAST_SAMPLES else {what: slope_of(what, counted) for what in GROWTH}
    gc_pause_ms = max(sample.gc_pause_ms for sample in samples)
    return ProcessLife(name, pid, round(began_s, 1), round(ended_s - began_s, 1), slopes, round(gc_pause_ms, 2))


def counted_part(samples: Sequence[SizeSample]) -> Sequence[SizeSample]:
    """Return the samples after the first part of a life; none of a short one."""
    life_s = samples[-1].at_s - samples[0].at_s
    if life_s < LEAST_LIFE_S:
        return ()
    warm_s = max(WARM_SHARE * life_s, min(WARM_S, life_s / 2))
    return [sample for sample in samples if sample.at_s - samples[0].at_s >= warm_s]


def slope_of(what: str, samples: Sequence[SizeSample]) -> Slope:
    values = [float(getattr(sample, what)) for sample in samples]
    third = len(values) // 3
    first, last = median(values[:third]), median(values[-third:])
    return Slope(
        first=round(first, 2),
        last=round(last, 2),
        most=round(max(values), 2),
        per_hour=round(3600 * line_slope([sample.at_s for sample in samples], values), 2),
        growth=round(last - first, 2),
        is_flat=last - first <= GROWTH[what],
    )


def line_slope(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope, per second, of the line with the least squares."""
    mean_s, mean = sum(times_s) / len(times_s), sum(values) / len(values)
    spread = sum((at_s - mean_s) ** 2 for at_s in times_s)
    if spread == 0:
        return 0.0
    return sum((at_s - mean_s) * (value - mean) for at_s, value in zip(times_s, values, strict=True)) / spread
