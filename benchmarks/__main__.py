"""`kvmesh bench <what>`: measure one part."""

import importlib
import sys

from protocol.errors import ConfigError

BENCHMARKS = {
    "engine": "benchmarks.engine",
    "fidelity": "benchmarks.fidelity",
    "frontend": "benchmarks.frontend",
    "index": "benchmarks.index",
    "planner": "benchmarks.planner",
    "soak": "benchmarks.soak",
    "streams": "benchmarks.streams",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in BENCHMARKS:
        found = f"no benchmark {argv[0]!r}" if argv else "no benchmark is named"
        raise ConfigError(found, hint=f"there are: {', '.join(BENCHMARKS)}")
    return int(importlib.import_module(BENCHMARKS[argv[0]]).main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
