"""Run `kvmesh planner`, or `kvmesh planner explain`, which shows what a planner has decided, and why."""

import sys

import planner.__main__ as service
from planner.explain import explain


def main(argv: list[str]) -> int:
    if argv and argv[0] == "explain":
        return explain(argv[1:])
    sys.argv[1:] = argv
    return service.main()
