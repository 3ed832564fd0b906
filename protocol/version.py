"""Decide which releases of kvmesh work together. Pure; docs/releasing.md says when the numbers are raised."""

import re
from typing import NamedTuple

from kvmesh.protocol.errors import WireError

RELEASE = "0.3.0"
PROTOCOL_VERSION = 2  # of this release
OLDEST_PROTOCOL = 1  # the oldest that this release understands
UNNAMED_PROTOCOL = 1  # of releases whose cards and frames name none: 0.1.0

NEIGHBOURS = "run releases together that are next to each other: docs/releasing.md"  # a hint of errors

_RELEASE_TEXT = re.compile(r"[0-9A-Za-z.+-]{1,32}")


class VersionError(WireError):
    """Two processes have no version of the protocol in common."""

    code = "version"


class Versions(NamedTuple):
    """The versions that one process understands."""

    protocol: int = UNNAMED_PROTOCOL
    oldest: int = UNNAMED_PROTOCOL
    release: str = ""  # to be shown; nothing is decided by it

    def __str__(self) -> str:
        spoken = f"protocol {self.protocol}"
        if self.oldest != self.protocol:
            spoken += f", and {self.oldest} or newer of its peers"
        return f"{spoken} ({release_name(self.release)})"


OURS = Versions(PROTOCOL_VERSION, OLDEST_PROTOCOL, RELEASE)


def common_version(theirs: Versions, ours: Versions = OURS) -> int:
    """Return the version to be spoken with a peer: the newest that both understand. Raises VersionError."""
    common = min(ours.protocol, theirs.protocol)
    if common >= max(ours.oldest, theirs.oldest):
        return common
    raise VersionError(f"it speaks {theirs}, this process {ours}", hint=NEIGHBOURS)


def release_name(release: str) -> str:
    """Return how a release is shown. Text from a peer is shown only if it looks like a release."""
    if not release:
        return "kvmesh 0.1"
    return f"kvmesh {release}" if _RELEASE_TEXT.fullmatch(release) else "an unreadable release"
