"""Turn what users saw into figures, and say how far a simulation is from what really happened. Pure."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

MOST_ERROR = 0.2  # of any figure: beyond it nothing is answered
LEAST_SHARE = 0.1  # errors of smaller shares are measured against this one


class ServedRequest(NamedTuple):
    """One answer, measured or simulated."""

    isl_tokens: int
    cached_tokens: int
    ttft_s: float
    itl_s: float | None


class ServiceFigures(Struct, frozen=True, kw_only=True):
    """None: there was nothing to measure."""

    ttft_p50_s: float | None
    ttft_p90_s: float | None
    itl_p50_s: float | None
    itl_p90_s: float | None
    hit_share: float  # of prompt tokens, those that came from a cache
    attainment: float  # share of the requests with TTFT and ITL within the SLO
    failed: int = 0


class FigureError(Struct, frozen=True):
    name: str
    measured: float
    simulated: float
    error: float  # simulated / measured - 1; of a share: the difference over the measured one, or over a tenth


SHARES = ("hit_share", "attainment")
TIMES = ("ttft_p50_s", "ttft_p90_s", "itl_p50_s", "itl_p90_s")


def figures_of(served: Sequence[ServedRequest], ttft_slo_s: float, itl_slo_s: float, failed: int = 0) -> ServiceFigures:
    """Return the figures of requests, `failed` of which were not answered."""
    ttft = [one.ttft_s for one in served]
    itl = [one.itl_s for one in served if one.itl_s is not None]
    good = [one for one in served if one.ttft_s <= ttft_slo_s and (one.itl_s or 0.0) <= itl_slo_s]
    return ServiceFigures(
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p90_s=percentile(ttft, 0.9),
        itl_p50_s=percentile(itl, 0.5),
        itl_p90_s=percentile(itl, 0.9),
        hit_share=sum(one.cached_tokens for one in served) / max(1, sum(one.isl_tokens for one in served)),
        attainment=len(good) / max(1, len(served) + failed),
        failed=failed,
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of all lie below; None without values."""
    return sorted(values)[min(len(values) - 1, math.floor(len(values) * share))] if values else None


def errors_of(measured: ServiceFigures, simulated: ServiceFigures) -> list[FigureError]:
    """Return the error of each figure that there is."""
    errors: list[FigureError] = []
    for name in (*TIMES, *SHARES):
        real, made = getattr(measured, name), getattr(simulated, name)
        if real is None and made is None:
            continue
        if real is None or made is None:
            errors.append(FigureError(name, real or 0.0, made or 0.0, 1.0))
            continue
        against = max(real, LEAST_SHARE) if name in SHARES else max(real, 1e-9)
        errors.append(FigureError(name, real, made, (made - real) / against))
    return errors


def worst_of(errors: Sequence[FigureError]) -> float:
    return max((abs(error.error) for error in errors), default=math.inf)
