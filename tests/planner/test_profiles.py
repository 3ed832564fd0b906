"""Profiles for the planner, from files or from the mock engine's own model."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.profiles import open_profiles, polynomial_profile
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.timing import PolynomialTiming


@given(st.integers(1, 512), st.floats(0.1, 50))
def test_prompt_times_match_the_mock_engine_within_a_percent(tokens: int, speedup: float) -> None:
    profile, timing = polynomial_profile(32768, 32, 512, speedup), PolynomialTiming(32768, speedup)
    assert profile.prefill_s(tokens) == pytest.approx(timing.prefill_s(tokens), rel=0.01)


@given(st.integers(0, 32768), st.integers(1, 32))
def test_step_times_match_the_mock_engine_within_a_percent(held: int, sequences: int) -> None:
    profile, timing = polynomial_profile(32768, 32, 512), PolynomialTiming(32768)
    assert profile.decode_s(held, held / sequences) == pytest.approx(timing.decode_s(sequences, held), rel=0.01)


def test_a_fixed_step_time_is_kept_to() -> None:
    assert polynomial_profile(1024, 8, 512, itl_s=0.02).decode_s(500, 100) == 0.02


def test_mock_workers_need_no_file() -> None:
    prefill, decode = open_profiles(ServiceConfig(prefill_profile="mock", mock_speedup=2.0, start_s=4.0))
    assert prefill == decode
    assert (prefill.provider, prefill.start_s) == ("polynomial", 4.0)


def test_each_role_may_have_its_own_file(tmp_path: Path) -> None:
    whole = polynomial_profile(1024, 8, 512)
    only_prefill, only_decode = (msgspec.structs.replace(whole, **{table: None}) for table in ("decode", "prefill"))
    for name, profile in (("p", only_prefill), ("d", only_decode)):
        (tmp_path / name).write_bytes(msgspec.json.encode(profile))
    config = ServiceConfig(prefill_profile=str(tmp_path / "p"), decode_profile=str(tmp_path / "d"))
    assert open_profiles(config) == (only_prefill, only_decode)
    with pytest.raises(ConfigError, match="no decode table"):
        open_profiles(ServiceConfig(prefill_profile=str(tmp_path / "p")))
    with pytest.raises(ConfigError, match="no prefill table"):
        open_profiles(ServiceConfig(prefill_profile=str(tmp_path / "d")))


def test_without_a_profile_the_error_says_how_to_get_one() -> None:
    with pytest.raises(ConfigError, match=r"kvmesh profile.*--prefill-profile"):
        open_profiles(ServiceConfig())
