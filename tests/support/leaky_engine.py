"""A service whose engine breaks at a prompt of a certain length, and says the prompt in its exception.

`python -m tests.support.leaky_engine MODULE ...` runs a service so.
"""

import runpy
import sys
from collections.abc import Sequence

from kvmesh.workers.engines.mock.executor import MockExecutor
from kvmesh.workers.executor import Result, Row

DEADLY_TOKENS = 77
LEAK = "LEAKED-prompt-in-the-text-of-an-exception"

_execute = MockExecutor.execute


def execute(self: MockExecutor, rows: Sequence[Row]) -> list[Result]:
    for row in rows:
        if len(row.token_ids) == DEADLY_TOKENS:
            raise RuntimeError(f"cannot compute {LEAK}")
    return _execute(self, rows)


if __name__ == "__main__":
    MockExecutor.execute = execute  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
