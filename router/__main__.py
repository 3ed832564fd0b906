"""Run a router by itself: `python -m router`."""

import os
import sys

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
            description="Run a router by itself, for frontends started with --router remote.",
            section="router",
        )
        setup_logging(config.name, level=config.log_level, fmt=config.log_format)
    except ConfigError as error:
        print(f"kvmesh router: {error}", file=sys.stderr)
        return 2
    return run(lambda stop: serve(config, stop))


if __name__ == "__main__":
    sys.exit(main())
