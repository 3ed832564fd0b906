"""Run the memory service of this host: `kvmesh memory`."""

from kvmesh.mesh.starting import end_on_signals

if __name__ == "__main__":
    end_on_signals()  # also while the modules below are imported

import os
import sys

import msgspec

from kvmesh.mesh.config import load
from kvmesh.mesh.lifecycle import run
from kvmesh.mesh.telemetry import setup_logging
from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.memory.client import read_holdings
from kvmesh.workers.memory.config import MemoryConfig
from kvmesh.workers.memory.messages import Holdings
from kvmesh.workers.memory.service import serve


def main() -> int:
    try:
        config = load(
            MemoryConfig,
            sys.argv[1:],
            os.environ,
            prefix="KVMESH_MEMORY_",
            prog="kvmesh memory",
            description="Keep the weights of this host's torch workers in memory, once, for all of them to map. "
            "Workers find it by --weights-service. See docs/memory-service.md.",
            section="memory",
        )
        setup_logging("memory", level=config.log_level, fmt=config.log_format)
        if config.status:
            return show_status(config)
    except ConfigError as error:
        print(f"kvmesh memory: {error}", file=sys.stderr)
        return 2
    return run(lambda stop: serve(config, stop))


def show_status(config: MemoryConfig) -> int:
    """Raise ConfigError if no service answers."""
    holdings = read_holdings(config.socket)
    print(msgspec.json.encode(holdings).decode() if config.json else table_of(holdings))
    return 0


def table_of(holdings: Holdings) -> str:
    used = sum(image.num_bytes for image in holdings.images)
    lines = [f"process {holdings.pid}: {used >> 20} of {holdings.limit_bytes >> 20} MiB"]
    for image in holdings.images:
        waiting = f", {image.waiting} wait" if image.waiting else ""
        lines.append(f"{image.num_bytes >> 20:>8} MiB  {image.state:<8} {image.users} users{waiting}  {image.label}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
