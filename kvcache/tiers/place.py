"""Read the setting that names shared storage. Pure."""

from typing import NamedTuple

from protocol.errors import ConfigError


class FolderPlace(NamedTuple):
    """A folder, on one host or on a file system of several."""

    path: str


def place_of(place: str) -> FolderPlace:
    """Return what `--kv-shared` names. Raise ConfigError."""
    kind, _, path = place.partition(":")
    if kind == "dir" and path:
        return FolderPlace(path)
    raise ConfigError(f"no shared storage {place!r}", hint="set --kv-shared to dir:PATH")
