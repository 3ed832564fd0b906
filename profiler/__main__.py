"""Choose a command of `kvmesh profile`."""

import importlib
import sys

from kvmesh.mesh.config import unknown
from kvmesh.mesh.lifecycle import run_command

COMMANDS = {
    "measure": ("kvmesh.profiler.commands.measure", "measure a running server, or an engine in this process"),
    "estimate": (
        "kvmesh.profiler.commands.estimate",
        "estimate from a model's config.json and a data sheet, without hardware",
    ),
    "plan": ("kvmesh.profiler.commands.plan", "choose mappings and counts that keep an SLO; write the deployment"),
    "import": ("kvmesh.profiler.commands.import_npz", "make a profile of a NumPy archive that another tool wrote"),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, rest = (argv[0], argv[1:]) if not argv[0].startswith("-") else ("measure", argv)
    if name not in COMMANDS:
        raise unknown(f"command {name!r} of profile", name, COMMANDS, f"there are: {', '.join(COMMANDS)}")
    return int(importlib.import_module(COMMANDS[name][0]).main(rest))


def usage() -> str:
    lines = [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    head = "usage: kvmesh profile <command> [options]; `kvmesh profile <command> --help` lists them"
    return "\n".join([head, "", *lines])


if __name__ == "__main__":
    sys.exit(run_command("profile", main, sys.argv[1:]))
