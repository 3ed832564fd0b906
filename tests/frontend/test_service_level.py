"""A request keeps the SLO, misses it or does not count."""

import pytest

from kvmesh.frontend.service_level import ServiceLevel

SLO = ServiceLevel(ttft_s=1.0, itl_s=0.1)


@pytest.mark.parametrize(
    ("outcome", "ttft_s", "itl_s", "missed"),
    [
        ("ok", 1.0, 0.1, "none"),
        ("ok", 1.1, 0.1, "ttft"),
        ("ok", 1.0, 0.2, "itl"),
        ("ok", 2.0, 0.2, "both"),
        ("ok", 0.5, 0.0, "none"),  # one token has no gap
        ("ok", None, 0.0, "none"),  # vectors have no tokens
        ("engine", 0.5, 0.05, "failed"),
        ("overloaded", None, 0.0, "failed"),
        ("no_worker", None, 0.0, "failed"),
        ("internal", None, 0.0, "failed"),
        ("client_gone", 0.5, 0.05, None),
        ("invalid_request", None, 0.0, None),
        ("rate_limited", None, 0.0, None),
        ("model_not_found", None, 0.0, None),
    ],
)
def test_what_a_request_has_missed(outcome: str, ttft_s: float | None, itl_s: float, missed: str | None) -> None:
    assert SLO.missed(outcome, ttft_s, itl_s) == missed
