"""Put a process into a memory cgroup that is too small for it: the kernel kills it in the middle of its work."""

import os
from contextlib import suppress
from pathlib import Path

ROOTS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))  # v1, v2
LIMIT_BYTES = 1 << 20  # what the process has already counts elsewhere


def why_unavailable() -> str:
    """Return why no memory cgroup can be made here, "" if one can."""
    try:
        made = MemoryLimit("probe")
    except OSError as error:
        return f"a memory cgroup needs root and the controller: {error}"
    made.end()
    return ""


class MemoryLimit:
    """One cgroup of this run."""

    def __init__(self, name: str) -> None:
        """Make it. Raise OSError if that is not allowed."""
        root, limit = next(((root, limit) for root, limit in ROOTS if _has_memory(root, limit)), ROOTS[-1])
        self._folder = root / f"kvmesh-faults-{os.getpid()}-{name}"
        self._folder.mkdir()
        try:
            (self._folder / limit).write_text(str(LIMIT_BYTES))
        except OSError:
            self._folder.rmdir()
            raise

    def begin(self, pid: int) -> None:
        """Put a process in. Raise OSError if it has ended."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def end(self) -> None:
        """Remove it. A process that still lives goes back to the parent of the cgroup."""
        with suppress(OSError):
            for pid in (self._folder / "cgroup.procs").read_text().split():
                (self._folder.parent / "cgroup.procs").write_text(pid)
        with suppress(OSError):
            self._folder.rmdir()


def _has_memory(root: Path, limit: str) -> bool:
    if limit == "memory.max":
        return root.joinpath("cgroup.subtree_control").is_file()
    return root.joinpath(limit).is_file()
