"""Run one frontend: `kvmesh frontend`."""

from kvmesh.mesh.starting import end_on_signals

if __name__ == "__main__":
    end_on_signals()  # also while the modules below are imported

import os
import sys

from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.processes import serve_processes
from kvmesh.frontend.service import serve
from kvmesh.mesh.config import config_path, load
from kvmesh.mesh.lifecycle import run
from kvmesh.mesh.telemetry import setup_logging
from kvmesh.protocol.errors import ConfigError
from kvmesh.router.config import RouterConfig


def main() -> int:
    try:
        config = load(
            FrontendConfig,
            sys.argv[1:],
            os.environ,
            prefix="KVMESH_FRONTEND_",
            prog="kvmesh frontend",
            description="Run one frontend: OpenAI's API in, tokens out. The embedded router reads KVMESH_ROUTER_*.",
            section="frontend",
        )
        file = config_path(sys.argv[1:], os.environ, "KVMESH_FRONTEND_")  # the embedded router reads its own table
        router_flags = ["--config", file] if file else []
        router_config = load(
            RouterConfig, router_flags, os.environ, prefix="KVMESH_ROUTER_", prog="kvmesh router", section="router"
        )
        setup_logging("frontend", level=config.log_level, fmt=config.log_format)
    except ConfigError as error:
        print(f"kvmesh frontend: {error}", file=sys.stderr)
        return 2
    if config.processes > 1:
        return run(lambda stop: serve_processes(config, file, stop))
    return run(lambda stop: serve(config, router_config, stop))


if __name__ == "__main__":
    sys.exit(main())
