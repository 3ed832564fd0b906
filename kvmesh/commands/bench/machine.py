"""Name the machine that was measured."""

import platform
from pathlib import Path


def cpu_name() -> str:
    """Return the name of the processor, as Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
