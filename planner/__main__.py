"""Run the planner as a process: `kvmesh planner`."""

from kvmesh.mesh.starting import end_on_signals

if __name__ == "__main__":
    end_on_signals()  # also while the modules below are imported

import os
import sys

from kvmesh.mesh.config import load
from kvmesh.mesh.lifecycle import run
from kvmesh.mesh.telemetry import setup_logging
from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.service import serve
from kvmesh.protocol.errors import ConfigError


def main() -> int:
    try:
        config = load(
            ServiceConfig,
            sys.argv[1:],
            os.environ,
            prefix="KVMESH_PLANNER_",
            prog="kvmesh planner",
            description="Watch the traffic, forecast it, and have prefill and decode workers started and stopped so "
            "that an SLO is kept. See docs/planner-operations.md.",
            section="planner",
            foreign=("KVMESH_PLANNER_EXPLAIN_", "KVMESH_PLANNER_APPLY_"),
        )
        setup_logging(config.name, level=config.log_level, fmt=config.log_format)
    except ConfigError as error:
        print(f"kvmesh planner: {error}", file=sys.stderr)
        return 2
    return run(lambda stop: serve(config, stop))


if __name__ == "__main__":
    sys.exit(main())
