"""Test the step times of an engine that computes nothing: the published fit, to the digit, and profiles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.profile import DecodeTable, PrefillTable, Profile
from kvmesh.protocol.timing import PolynomialTiming, ProfileTiming, Timing

TOTAL = 16384 * 64
TABLES = Profile(
    model="m",
    engine="e",
    device="d",
    total_kv_tokens=1000,
    prefill=PrefillTable(isl_tokens=[100, 200, 400], ttft_s=[0.1, 0.3, 0.5]),
    decode=DecodeTable(kv_tokens=[0, 100], context_tokens=[10, 20], itl_s=[[1.0, 2.0], [3.0, 6.0]]),
)


@pytest.mark.parametrize(
    ("new_tokens", "prefill_ms"), [(0, 0.0), (1, 16.516603860998), (512, 24.3857036156), (8192, 169.1369184)]
)
def test_prefill_by_the_fit_is_as_published(new_tokens: int, prefill_ms: float) -> None:
    assert PolynomialTiming(TOTAL).prefill_s(new_tokens) * 1000 == pytest.approx(prefill_ms, rel=1e-6)
    published = (4.209989e-07 * new_tokens**2 + 1.518344e-02 * new_tokens + 16.50142) if new_tokens else 0.0
    assert PolynomialTiming(TOTAL).prefill_s(new_tokens) == published / 1e3


@pytest.mark.parametrize(("usage", "decode_ms"), [(0.0, 5.74), (0.25, 17.63375), (0.5, 26.31), (1.0, 34.01)])
def test_decode_by_the_fit_is_as_published(usage: float, decode_ms: float) -> None:
    assert PolynomialTiming(TOTAL).decode_s(1, int(usage * TOTAL)) * 1000 == pytest.approx(decode_ms)


def test_shared_blocks_never_make_a_cache_more_than_full() -> None:
    """Sequences that share blocks may hold more tokens together than there are."""
    assert PolynomialTiming(100).decode_s(9, 900) == PolynomialTiming(100).decode_s(1, 100)


@pytest.mark.parametrize("timing", [PolynomialTiming(TOTAL), ProfileTiming(TABLES)])
def test_nothing_to_do_takes_no_time(timing: Timing) -> None:
    assert timing.prefill_s(0) == timing.decode_s(0, 1000) == 0


@pytest.mark.parametrize(("isl", "ttft_s"), [(100, 0.1), (150, 0.2), (300, 0.4), (800, 0.9), (60, 0.02), (10, 0.0)])
def test_profile_prefill_is_linear_beyond_its_points_and_never_negative(isl: int, ttft_s: float) -> None:
    assert ProfileTiming(TABLES).prefill_s(isl) == pytest.approx(ttft_s)


@pytest.mark.parametrize(
    ("sequences", "kv_tokens", "itl_s"),
    [(1, 10, 1.2), (5, 50, 2.0), (5, 100, 6.0), (10, 100, 3.0), (4, 60, 3.3), (1, 999, 6.0)],
)
def test_decode_by_a_profile_is_bilinear_and_stays_within_it(sequences: int, kv_tokens: int, itl_s: float) -> None:
    assert ProfileTiming(TABLES).decode_s(sequences, kv_tokens) == pytest.approx(itl_s)


@given(tokens=st.integers(1, 10**6), speedup=st.floats(0.1, 100))
def test_a_speedup_divides_all_times(tokens: int, speedup: float) -> None:
    for plain, fast in (
        (PolynomialTiming(TOTAL), PolynomialTiming(TOTAL, speedup)),
        (ProfileTiming(TABLES), ProfileTiming(TABLES, speedup)),
    ):
        assert fast.prefill_s(tokens) == pytest.approx(plain.prefill_s(tokens) / speedup)
        assert fast.decode_s(3, tokens) == pytest.approx(plain.decode_s(3, tokens) / speedup)
