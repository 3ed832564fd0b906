"""Decide whether a request was served well enough. Pure.

A request counts if the mesh is to answer for it: not if the client left, sent nonsense or went over a limit of its key.
"""

import math
from dataclasses import dataclass
from typing import Literal

from kvmesh.mesh.http.errors import CODES, http_failure

Missed = Literal["none", "ttft", "itl", "both", "failed"]
_OURS = frozenset(code for code in CODES if http_failure(code).status >= 500) | {"internal", "overloaded"}


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """The longest times that count as good service."""

    ttft_s: float = math.inf
    itl_s: float = math.inf

    def missed(self, outcome: str, ttft_s: float | None, itl_s: float) -> Missed | None:
        """Return what a request has missed; None if it does not count.

        `ttft_s` is None if there was no token, `itl_s` is the longest mean gap of its answers, 0 if there is none.
        """
        if outcome != "ok":
            return "failed" if outcome in _OURS else None
        late = ttft_s is not None and ttft_s > self.ttft_s
        if itl_s > self.itl_s:
            return "both" if late else "itl"
        return "ttft" if late else "none"


NO_LIMIT = ServiceLevel()
