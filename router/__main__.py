"""Run a router by itself: `kvmesh router`."""

from kvmesh.mesh.starting import end_on_signals

if __name__ == "__main__":
    end_on_signals()  # also while the modules below are imported

import os
import sys

from kvmesh.mesh import extensions
from kvmesh.mesh.config import load
from kvmesh.mesh.lifecycle import run
from kvmesh.mesh.telemetry import setup_logging
from kvmesh.protocol.errors import ConfigError
from kvmesh.router.config import RouterConfig
from kvmesh.router.extension import RouterExtension
from kvmesh.router.service import serve


def main() -> int:
    try:
        config = load(
            RouterConfig,
            sys.argv[1:],
            os.environ,
            prefix="KVMESH_ROUTER_",
            prog="kvmesh router",
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
    picker: RouterExtension | None = next(extensions.load("router"), None)
    if picker is None:
        print("kvmesh router: --ext-proc-port needs the endpoint picker, which is not installed", file=sys.stderr)
        return 2
    return run(lambda stop: picker.serve(config, stop))


if __name__ == "__main__":
    sys.exit(main())
