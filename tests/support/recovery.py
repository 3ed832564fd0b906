"""Set how long a test leaves a recovery.

Sharp times belong in `kvmesh lab faults` and benches, because a shared machine stands still.

The recovery takes up to 3 s on a machine that has time. Where the test can, it makes the slow way as slow as WITHOUT_S,
so that a missing safeguard is told apart from a busy machine.
"""

from dataclasses import replace

import pytest

from kvmesh.mesh.plane import peer_watch
from kvmesh.mesh.plane.pulse import CALM

WITHOUT_S = 50.0  # what the fault costs without the safeguard
RECOVERED_S = 20.0
OWN_WAY_S = 10.0  # ... where the slow way takes the 15 s and more that it takes in service


def slow_without_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls of this process that are not hasty bear silence for WITHOUT_S."""
    monkeypatch.setattr(peer_watch, "CALM", replace(CALM, silent_s=WITHOUT_S, deaf_s=WITHOUT_S))
