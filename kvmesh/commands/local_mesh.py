"""Find the control socket of a mesh that `kvmesh up` runs on this machine. Only the mesh's user can open it."""

import os
import socket
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from kvmesh.cluster.run_folder import PREFIX
from kvmesh.mesh.short_folder import temporary_parents
from kvmesh.planner.config import CONTROL_FILE
from kvmesh.protocol.errors import ConfigError

CONNECT_S = 2.0
ControlPath = Annotated[  # the type of a command's setting
    str,
    Meta(description="control socket of `kvmesh up`, or its --run-dir; default: your only mesh on this machine"),
]


def find_control(given: str) -> Path | None:
    """Return the path of the control socket; None if none is given and none is found. Raise ConfigError.

    Without `given`, the user's own meshes in temporary folders count; one with a --run-dir is found only by its name.
    """
    if given:
        path = Path(given.removeprefix("unix:"))
        return Path(os.path.realpath(path / "control" / CONTROL_FILE if path.is_dir() else path))
    places = [path for one in temporary_parents() for path in one.glob(f"{PREFIX}*/control/{CONTROL_FILE}")]
    found = sorted(path for path in set(map(os.path.realpath, places)) if is_own(path) and answers(path))
    if len(found) > 1:
        raise ConfigError(f"{len(found)} meshes run here", hint=f"give --control one of {', '.join(found)}")
    return Path(found[0]) if found else None


def is_own(path: str) -> bool:
    """Return whether the user has made this socket: in a folder for all, others can leave sockets of any name."""
    try:
        return os.stat(path).st_uid == os.geteuid()
    except OSError:
        return False


def answers(path: str) -> bool:
    """Return whether a process listens at `path`; a mesh that was killed leaves its socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
