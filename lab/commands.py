"""The commands of the laboratory: `kvmesh lab <name>`."""

import importlib

from kvmesh.mesh.config import unknown

COMMANDS = {
    "bench": ("kvmesh.lab.bench.__main__", "measure a part: frontend, engine, index, planner, ..."),
    "faults": ("kvmesh.lab.faults.command", "a mesh on this machine under a seeded schedule of faults, with an oracle"),
    "soak": ("kvmesh.lab.soak", "a mesh on this machine under everything for a long time: does a process grow?"),
    "overload": ("kvmesh.lab.overload.command", "what a mesh answers in time at 1, 3 and 10 times what it can do"),
    "cluster-check": ("kvmesh.lab.hosts.command", "a mesh on four hosts of this machine, under every fault (root)"),
    "demo-planner": ("kvmesh.lab.demo_planner", "a load that triples and falls, and a planner that follows it"),
    "metrics-check": (
        "kvmesh.lab.observability.check",
        "check metrics, dashboards and alerts on a running mesh and Prometheus",
    ),
    "metrics-docs": (
        "kvmesh.lab.observability.write",
        "write docs/metrics.md and the dashboards anew (--check: are they old?)",
    ),
}


def main(argv: list[str]) -> int:
    """Raise ConfigError for a name that the laboratory does not have."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] not in COMMANDS:
        raise unknown(f"command {argv[0]!r} of the laboratory", argv[0], COMMANDS, f"there are: {', '.join(COMMANDS)}")
    return int(importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:]))


def usage() -> str:
    lines = [f"  {name:<13} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: kvmesh lab <command> [options]; `kvmesh lab <command> --help` lists them", "", *lines])
