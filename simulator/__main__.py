"""Run `python -m simulator`, which is the same as `kvmesh replay`."""

import sys

from mesh.lifecycle import run_command
from simulator.replay import main

if __name__ == "__main__":
    sys.exit(run_command("replay", main, sys.argv[1:]))
