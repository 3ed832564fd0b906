"""Run the planner as a process: `python -m planner`."""

from mesh.starting import end_on_signals

if __name__ == "__main__":
    end_on_signals()  # also while the modules below are imported

import os
import sys

from mesh.config import load
from mesh.lifecycle import run
from mesh.telemetry import setup_logging
from planner.config import ServiceConfig
from planner.service import serve
from protocol.errors import ConfigError


def main() -> int:
    try:
        config = load(
            ServiceConfig,
            sys.argv[1:],
            os.environ,
            prefix="KVMESH_PLANNER_",
            prog="python -m planner",
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
