"""Run one worker: `kvmesh worker`."""

from kvmesh.mesh.starting import end_on_signals

if __name__ == "__main__":
    end_on_signals()  # also while the modules below are imported

import logging
import os
import sys
import threading

from kvmesh.mesh.config import load
from kvmesh.mesh.lifecycle import run
from kvmesh.mesh.telemetry import setup_logging
from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.config import WorkerConfig, with_engine_args
from kvmesh.workers.durable_tier import TIER_THREAD
from kvmesh.workers.names import with_name
from kvmesh.workers.service import serve
from kvmesh.workers.step_engine import ENGINE_THREAD


def main() -> int:
    try:
        config = with_name(
            load(
                WorkerConfig,
                with_engine_args(sys.argv[1:]),
                os.environ,
                prefix="KVMESH_WORKER_",
                prog="kvmesh worker",
                description="Run one worker: an engine that prefills, decodes, or both.",
                section="worker",
            )
        )
        setup_logging(config.name, level=config.log_level, fmt=config.log_format)
    except ConfigError as error:
        print(f"kvmesh worker: {error}", file=sys.stderr)
        return 2
    code = run(lambda stop: serve(config, stop))
    if any(thread.name.startswith((ENGINE_THREAD, TIER_THREAD)) for thread in threading.enumerate()):
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)  # the interpreter would wait for a step, or a disk, that never ends
    return code


if __name__ == "__main__":
    sys.exit(main())
