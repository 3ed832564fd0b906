"""Run `kvmesh replay`, which is the same as `kvmesh replay`."""

import sys

from kvmesh.mesh.lifecycle import run_command
from kvmesh.simulator.replay import main

if __name__ == "__main__":
    sys.exit(run_command("replay", main, sys.argv[1:]))
