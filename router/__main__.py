"""Run a router by itself: `python -m router`."""

from mesh.starting import end_on_signals

if __name__ == "__main__":
    end_on_signals()  # also while the modules below are imported

import os
import sys
from importlib import import_module

from mesh.config import load
from mesh.lifecycle import run
from mesh.telemetry import setup_logging
from protocol.errors import ConfigError
from router.config import RouterConfig
from router.service import serve


def main() -> int:
    try:
        config = load(
            RouterConfig,
            sys.argv[1:],
            os.environ,
            prefix="KVMESH_ROUTER_",
            prog="python -m router",
            description="Run a router by itself: for frontends started with --router remote, or, with --ext-proc-port, "
            "as the endpoint picker of a gateway.",
            section="router",
        )
        setup_logging(config.name, level=config.log_level, fmt=config.log_format)
    except ConfigError as error:
        print(f"kvmesh router: {error}", file=sys.stderr)
        return 2
    if config.ext_proc_port is None:
        return run(lambda stop: serve(config, stop))
    picker = import_module("frontend.picker.service")  # the one place that reaches up: docs/architecture.md, "Tree"
    return run(lambda stop: picker.serve(config, stop))


if __name__ == "__main__":
    sys.exit(main())
