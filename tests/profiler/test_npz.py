"""Profiles as NumPy archives, ours and those of others."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.profiler.commands.import_npz import main
from kvmesh.profiler.npz import read_npz, write_npz
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import DecodeTable, PrefillTable, Profile, read_profile

BARE = Profile(model="m", engine="e", device="d", total_kv_tokens=1000)
WHOLE = Profile(
    model="m",
    engine="e",
    device="d",
    total_kv_tokens=1000,
    prefill=PrefillTable(isl_tokens=[10, 20], ttft_s=[0.1, 0.25]),
    decode=DecodeTable(kv_tokens=[100, 200, 300], context_tokens=[10, 20], itl_s=[[1, 2], [3, 4], [5, 6]]),
)


def test_archives_are_read_as_written(tmp_path: Path) -> None:
    write_npz(WHOLE, tmp_path / "p.npz")
    assert read_npz(tmp_path / "p.npz", BARE) == WHOLE


def test_array_names_and_units_are_those_of_other_tools(tmp_path: Path) -> None:
    write_npz(WHOLE, tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz") as arrays:
        assert list(arrays["prefill_isl"]) == [10, 20]
        assert list(arrays["prefill_ttft_ms"]) == [100, 250]
        assert list(arrays["decode_active_kv_tokens"]) == [100, 100, 200, 200, 300, 300]
        assert list(arrays["decode_context_length"]) == [10, 20] * 3
        assert list(arrays["decode_itl"]) == [1000, 2000, 3000, 4000, 5000, 6000]


@given(st.permutations(range(6)))
def test_cells_may_come_in_any_order(order: list[int]) -> None:
    path = Path("p.npz")
    kv, context = np.repeat([100, 200, 300], 2)[order], np.tile([10, 20], 3)[order]
    itl = (np.arange(6) + 1.0)[order] * 1e3
    assert WHOLE.decode == _read(path, decode_active_kv_tokens=kv, decode_context_length=context, decode_itl=itl).decode


def test_axes_with_a_matrix_give_the_same_cells() -> None:
    itl = np.arange(1.0, 7.0).reshape(3, 2) * 1e3
    arrays = {"decode_active_kv_tokens": [100, 200, 300], "decode_context_length": [10, 20], "decode_itl": itl}
    assert WHOLE.decode == _read(Path("p.npz"), **arrays).decode


def test_a_cell_that_was_not_measured_takes_the_nearest() -> None:
    arrays = {
        "decode_active_kv_tokens": [100, 100, 300],
        "decode_context_length": [10, 20, 20],
        "decode_itl": [1000.0, 2000.0, 6000.0],
    }
    decode = _read(Path("p.npz"), **arrays).decode
    assert decode is not None
    assert decode.itl_s == [[1, 2], [6, 6]]


def _read(path: Path, **arrays: object) -> Profile:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / path, **{name: np.asarray(value) for name, value in arrays.items()})
        return read_npz(Path(folder) / path, BARE)


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"other": [1]}, "has no profile"),
        ({"prefill_isl": [1, 2], "prefill_ttft_ms": [1]}, "prefill_isl has 2 points, prefill_ttft_ms 1"),
        ({"prefill_isl": [1], "prefill_ttft_ms": [np.nan]}, "prefill_ttft_ms must have .* finite numbers"),
        ({"prefill_isl": [1], "prefill_ttft_ms": [-1]}, "prefill_ttft_ms must have .* >= 0"),
        ({"prefill_isl": [], "prefill_ttft_ms": []}, "prefill_isl must have 1 to"),
        (
            {"decode_active_kv_tokens": [1, 2], "decode_context_length": [1, 2, 3], "decode_itl": [1]},
            "have 2, 3 and 1 cells",
        ),
    ],
)
def test_a_bad_archive_is_refused_by_name(arrays: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        _read(Path("p.npz"), **arrays)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "p.npz").write_bytes(b"not an archive")
    with pytest.raises(ConfigError, match="is no NumPy archive"):
        read_npz(tmp_path / "p.npz", BARE)
    np.savez(tmp_path / "q.npz", allow_pickle=True, prefill_isl=np.array([object()], dtype=object))
    with pytest.raises(ConfigError, match="is no NumPy archive"):
        read_npz(tmp_path / "q.npz", BARE)


def test_an_archive_becomes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_npz(WHOLE, tmp_path / "p.npz")
    flags = ["--npz", str(tmp_path / "p.npz"), "--model", "m", "--engine", "vllm", "--mapping", "dep4"]
    assert main([*flags, "--out-dir", str(tmp_path)]) == 0
    path = Path(capsys.readouterr().out.strip())
    profile = read_profile(path)
    assert (profile.mapping, profile.gpus, profile.dp_size, profile.total_kv_tokens) == ("dep4", 4, 4, 300)
    assert (profile.prefill, profile.decode) == (WHOLE.prefill, WHOLE.decode)


def test_prompt_tables_alone_need_the_cache_size(tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", prefill_isl=[1], prefill_ttft_ms=[1.0])
    with pytest.raises(ConfigError, match="--total-kv-tokens"):
        main(["--npz", str(tmp_path / "p.npz"), "--model", "m", "--engine", "e", "--out-dir", str(tmp_path)])
