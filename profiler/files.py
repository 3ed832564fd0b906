"""Read and write the files of profiles."""

from pathlib import Path

import msgspec

from kvmesh.profiler.npz import write_npz
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import Profile, check_profile, read_profile


def profile_path(folder: Path, mapping: str, role: str = "both") -> Path:
    return folder / (f"{mapping}.json" if role == "both" else f"{mapping}-{role}.json")


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON, and its tables as NPZ. Raise ConfigError if the folder cannot be written."""
    check_profile(profile, str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".new")
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
        scratch.replace(path)  # never half a profile
        write_npz(profile, path.with_suffix(".npz"))
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", hint="name another folder with --out-dir"
        ) from error


def read_profiles(paths: tuple[str, ...]) -> list[Profile]:
    """Read profiles; a folder stands for all profiles in it. Raise ConfigError if there is none."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(
            f"no profiles in {', '.join(paths) or 'nothing'}", hint="name files that `kvmesh profile` has written"
        )
    return [read_profile(file) for file in files]
