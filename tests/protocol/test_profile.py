"""A profile: what may stand in the file, and what is read between its points."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import MAX_PROFILE_BYTES, DecodeTable, PrefillTable, Profile, read_profile

PREFILL = PrefillTable(isl_tokens=[16, 64, 256], ttft_s=[0.01, 0.02, 0.08])
DECODE = DecodeTable(kv_tokens=[100, 1000], context_tokens=[50, 200, 400], itl_s=[[1.0, 2.0, 3.0], [2.0, 4.0, 8.0]])


def profile(**fields: Any) -> Profile:
    known = {"model": "m", "engine": "mock", "device": "cpu", "total_kv_tokens": 4096}
    return Profile(**{**known, "prefill": PREFILL, "decode": DECODE, **fields})


def written(folder: Path, value: object) -> Path:
    path = folder / "profile.json"
    path.write_bytes(value if isinstance(value, bytes) else msgspec.json.encode(value))
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_profile(written(tmp_path, profile())) == profile()
    bare = profile(prefill=None, decode=None)
    assert read_profile(written(tmp_path, bare)) == bare


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b"", "is no profile"),
        (b"\xff\xfe", "is no profile"),
        ({"schema": "kvmesh-profile-1"}, "is no profile: .*missing required field"),
        (
            profile(prefill=PrefillTable(isl_tokens=[1, 2], ttft_s=[1.0])),
            "prefill.isl_tokens has 2 points, its table 1",
        ),
        (profile(prefill=PrefillTable(isl_tokens=[2, 2], ttft_s=[1.0, 1.0])), "prefill.isl_tokens does not increase"),
        (
            profile(decode=DecodeTable(kv_tokens=[1, 2], context_tokens=[1], itl_s=[[1.0]])),
            "decode.kv_tokens has 2 points, its table 1",
        ),
        (
            profile(decode=DecodeTable(kv_tokens=[1, 2], context_tokens=[1], itl_s=[[1.0], [1.0, 2.0]])),
            "decode.context_tokens has 1 points, its table 2",
        ),
        (profile(prefill=PrefillTable(isl_tokens=[1], ttft_s=[-1.0])), "is no profile: .*>= 0.0"),
    ],
)
def test_what_is_no_profile_is_refused_with_the_reason(tmp_path: Path, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_profile(written(tmp_path, value))


def test_missing_and_too_large_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no profile at .*; write one with `kvmesh profile`"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="a profile has at most"):
        read_profile(written(tmp_path, b" " * (MAX_PROFILE_BYTES + 1)))


def test_a_role_that_was_not_measured_takes_no_time() -> None:
    assert profile(prefill=None).prefill_s(100) == profile(decode=None).decode_s(100, 10) == 0


def test_its_points_are_given_back() -> None:
    assert [profile().prefill_s(isl) for isl in PREFILL.isl_tokens] == pytest.approx(PREFILL.ttft_s)
    for kv_tokens, row in zip(DECODE.kv_tokens, DECODE.itl_s, strict=True):
        assert [profile().decode_s(kv_tokens, context) for context in DECODE.context_tokens] == pytest.approx(row)


@given(kv_tokens=st.floats(0, 1e7), context=st.floats(0, 1e6))
def test_step_times_stay_between_the_measured_extremes(kv_tokens: float, context: float) -> None:
    assert 1.0 <= profile().decode_s(kv_tokens, context) <= 8.0
    assert profile().decode_s(kv_tokens, context) <= profile().decode_s(kv_tokens + 100, context) + 1e-9


@given(isl=st.floats(0, 1e7))
def test_a_longer_prompt_takes_longer(isl: float) -> None:
    assert profile().prefill_s(isl) <= profile().prefill_s(isl + 10)


def test_a_table_of_one_point_says_the_same_everywhere() -> None:
    one = profile(
        prefill=PrefillTable(isl_tokens=[100], ttft_s=[0.5]),
        decode=DecodeTable(kv_tokens=[100], context_tokens=[10], itl_s=[[0.25]]),
    )
    assert {one.prefill_s(isl) for isl in (1, 100, 1e6)} == {0.5}
    assert {one.decode_s(kv, 3) for kv in (1, 100, 1e6)} == {0.25}
