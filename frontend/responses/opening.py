"""Open the store of responses that a setting names."""

from pathlib import Path

from kvmesh.frontend.responses.directory_store import DirectoryStore
from kvmesh.frontend.responses.memory_store import MemoryStore
from kvmesh.frontend.responses.retention import StoreLimits
from kvmesh.frontend.responses.store import ResponseStore
from kvmesh.protocol.errors import ConfigError

OFF, MEMORY, DIRECTORY = "off", "memory", "dir:"


def check_setting(setting: str, *, is_one_process: bool) -> None:
    """Raise ConfigError for a store that does not exist, or that several processes cannot share."""
    is_directory = setting.startswith(DIRECTORY) and setting != DIRECTORY
    if setting not in (OFF, MEMORY) and not is_directory:
        raise ConfigError(f"no store of responses {setting!r}", hint="set --responses-store to off, memory or dir:PATH")
    if setting == MEMORY and not is_one_process:
        raise ConfigError(
            "--responses-store memory is one process's own, and another one would not find its responses",
            hint="use dir:PATH with --processes",
        )


def open_store(setting: str, limits: StoreLimits) -> ResponseStore | None:
    """Return the store, None for `off`. Raise ConfigError."""
    check_setting(setting, is_one_process=True)
    if setting == OFF:
        return None
    if setting == MEMORY:
        return MemoryStore(limits)
    return DirectoryStore(Path(setting.removeprefix(DIRECTORY)), limits)
