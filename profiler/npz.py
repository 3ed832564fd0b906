"""Read and write profiles as NumPy archives, with the array names that other tools use.

Times are milliseconds. The decode arrays have one entry per cell: KV tokens held, context of a sequence, step.
"""

import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import DecodeTable, PrefillTable, Profile, check_profile

MAX_NPZ_BYTES = 64 << 20
MAX_CELLS = 1 << 20
PREFILL = ("prefill_isl", "prefill_ttft_ms")
DECODE = ("decode_active_kv_tokens", "decode_context_length", "decode_itl")

Array = npt.NDArray[np.float64]


def write_npz(profile: Profile, path: Path) -> None:
    arrays: dict[str, Array] = {}
    if profile.prefill is not None:
        arrays[PREFILL[0]] = np.array(profile.prefill.isl_tokens, dtype=np.float64)
        arrays[PREFILL[1]] = np.array(profile.prefill.ttft_s) * 1e3
    if profile.decode is not None:
        kv, context = np.meshgrid(profile.decode.kv_tokens, profile.decode.context_tokens, indexing="ij")
        arrays[DECODE[0]] = kv.astype(np.float64).ravel()
        arrays[DECODE[1]] = context.astype(np.float64).ravel()
        arrays[DECODE[2]] = np.array(profile.decode.itl_s).ravel() * 1e3
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_npz(path: Path, profile: Profile) -> Profile:
    """Return `profile` with the tables of the archive. Raise ConfigError if it has none, or they cannot be used.

    The decode arrays are cells in any order, or two axes and a matrix [kv, context]. A cell that is missing from the
    grid takes the step of the nearest cell, measured in shares of the axes.
    """
    arrays = _arrays(path)
    prefill, decode = _prefill(path, arrays), _decode(path, arrays)
    if prefill is None and decode is None:
        raise ConfigError(f"{path} has no profile", hint=f"it needs {', '.join(PREFILL)} or {', '.join(DECODE)}")
    found = replace(profile, prefill=prefill, decode=decode)
    check_profile(found, str(path))
    return found


def _arrays(path: Path) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_NPZ_BYTES:
            raise ConfigError(f"{path} unpacks to {size} bytes, at most {MAX_NPZ_BYTES} are read")
        with np.load(path, allow_pickle=False) as file:
            found = {name: np.asarray(file[name], dtype=np.float64) for name in (*PREFILL, *DECODE) if name in file}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is no NumPy archive: {error}") from error
    for name, array in found.items():
        if array.size > MAX_CELLS or not array.size or not np.isfinite(array).all() or (array < 0).any():
            raise ConfigError(f"{path}: {name} must have 1 to {MAX_CELLS} finite numbers >= 0")
    return found


def _prefill(path: Path, arrays: dict[str, Array]) -> PrefillTable | None:
    if not all(name in arrays for name in PREFILL):
        return None
    isl, ttft = (arrays[name].ravel() for name in PREFILL)
    if isl.size != ttft.size:
        raise ConfigError(f"{path}: {PREFILL[0]} has {isl.size} points, {PREFILL[1]} {ttft.size}")
    axis, rows = np.unique(np.rint(isl).astype(np.int64), return_index=True)
    return PrefillTable(isl_tokens=axis.tolist(), ttft_s=(ttft[rows] / 1e3).tolist())


def _decode(path: Path, arrays: dict[str, Array]) -> DecodeTable | None:
    if not all(name in arrays for name in DECODE):
        return None
    kv, context, itl = (arrays[name] for name in DECODE)
    if kv.ndim == context.ndim == 1 and itl.shape == (kv.size, context.size):
        kv, context = np.meshgrid(kv, context, indexing="ij")
    if not kv.size == context.size == itl.size:
        raise ConfigError(f"{path}: {', '.join(DECODE)} have {kv.size}, {context.size} and {itl.size} cells")
    kv, context, itl = np.rint(kv).ravel(), np.rint(context).ravel(), itl.ravel() / 1e3
    rows, columns = np.unique(kv), np.unique(context)
    if rows.size * columns.size > MAX_CELLS:
        raise ConfigError(f"{path}: {rows.size} x {columns.size} cells, at most {MAX_CELLS}", hint="round the axes")
    grid = np.full((rows.size, columns.size), np.nan)
    grid[np.searchsorted(rows, kv), np.searchsorted(columns, context)] = itl
    for row, column in zip(*np.nonzero(np.isnan(grid)), strict=True):
        distance = np.hypot((kv - rows[row]) / rows[-1], (context - columns[column]) / columns[-1])
        grid[row, column] = itl[int(distance.argmin())]
    return DecodeTable(
        kv_tokens=rows.astype(np.int64).tolist(), context_tokens=columns.astype(np.int64).tolist(), itl_s=grid.tolist()
    )
