"""List what is specified in Python and built natively too, so that one test runs against both."""

from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.frontend import lane
from kvmesh.router import chains, index

NOT_BUILT = "the native code was not built here, or KVMESH_NATIVE=0"

needs_native = pytest.mark.skipif(not index.NATIVE, reason=NOT_BUILT)


def _both(plain: Callable[..., Any], native: Callable[..., Any] | None) -> list[Any]:
    return [pytest.param(plain, id="plain"), pytest.param(native, id="native", marks=needs_native)]


INDEXES = _both(index.PlainIndex, getattr(index, "NativeIndex", None))
CHAINS = _both(chains.PlainChainCounts, chains.ChainCounts)
LANES = _both(lane.PlainTokenLane, lane.TokenLane if lane.NATIVE else None)
