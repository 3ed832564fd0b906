"""Run `kvmesh planner`.

`kvmesh planner explain` shows what a planner has decided, and why. `kvmesh planner apply` carries out what a planner
elsewhere decides.
"""

import sys

import kvmesh.planner.__main__ as service
from kvmesh.planner.carry_out import apply
from kvmesh.planner.explain import explain


def main(argv: list[str]) -> int:
    if argv and argv[0] == "explain":
        return explain(argv[1:])
    if argv and argv[0] == "apply":
        return apply(argv[1:])
    sys.argv[1:] = argv
    return service.main()
