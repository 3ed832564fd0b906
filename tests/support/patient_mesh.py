"""`kvmesh` with a supervisor that starts a process again at once, however often it dies: tests kill a lot."""

import sys

import kvmesh.mesh.supervisor
from kvmesh.__main__ import main

if __name__ == "__main__":
    kvmesh.mesh.supervisor.STABLE_S = 0.0
    sys.exit(main())
