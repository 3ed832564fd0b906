"""Run a mock worker (`--mock-speedup 0`) whose thread gets stuck in a step, a few tokens into its answers."""

import dataclasses
import sys
import threading
from collections.abc import Sequence

from kvmesh.workers.__main__ import main
from kvmesh.workers.engines.mock.executor import MockExecutor
from kvmesh.workers.executor import ModelInfo, Result, Row

GOOD_STEPS = 8
load, execute = MockExecutor.load, MockExecutor.execute
steps = iter(range(GOOD_STEPS))


def load_without_pace(executor: MockExecutor) -> ModelInfo:
    """Have the steps run in a thread, as those of torch do."""
    return dataclasses.replace(load(executor), pace=None)


def execute_or_hang(executor: MockExecutor, rows: Sequence[Row]) -> list[Result]:
    if next(steps, None) is None:
        threading.Event().wait()
    return execute(executor, rows)


if __name__ == "__main__":
    MockExecutor.load = load_without_pace
    MockExecutor.execute = execute_or_hang
    sys.exit(main())
