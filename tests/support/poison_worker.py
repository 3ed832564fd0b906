"""Run a worker whose process ends at once when its mock engine computes a prompt that begins with POISON."""

import os
import runpy
import sys
from collections.abc import Sequence

from kvmesh.workers.engines.mock.executor import MockExecutor
from kvmesh.workers.executor import Result, Row

POISON = (666, 667, 668)
execute = MockExecutor.execute


def execute_or_die(executor: MockExecutor, rows: Sequence[Row]) -> list[Result]:
    if any(tuple(row.prompt[: len(POISON)]) == POISON for row in rows):
        os._exit(139)
    return execute(executor, rows)


def main() -> None:
    MockExecutor.execute = execute_or_die  # type: ignore[method-assign]
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
