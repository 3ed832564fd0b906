"""Set how many examples a property tries: a part of them in `make test`, all of them in `make test-all`.

KVMESH_TEST_BUDGET=large asks for all of them.
"""

import os

SMALLEST = 10
_BUDGET = os.environ.get("KVMESH_TEST_BUDGET", "small")
assert _BUDGET in ("small", "large"), f"KVMESH_TEST_BUDGET is {_BUDGET!r}: set it to small or large"
LARGE = _BUDGET == "large"


def examples(large: int) -> int:
    """Return `large` for the large budget; for the small one a fifth of `large`, but at least 10."""
    return large if LARGE else min(large, max(SMALLEST, large // 5))
