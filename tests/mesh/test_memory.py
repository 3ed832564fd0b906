"""Memory that was used once, and is free, goes back to the system."""

import subprocess
import sys

import pytest

HOLES = """
from pathlib import Path
from kvmesh.mesh.memory import give_back_free_memory
def rss_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
blocks = [b"x" * (64 << 10) for n in range(1600)]
full = rss_mib()
blocks = blocks[-1:]  # what lies below the last block stays
holes = rss_mib()
give_back_free_memory()
print(full, holes, rss_mib())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is asked")
def test_free_memory_below_a_block_in_use_is_given_back() -> None:
    run = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    full, holes, after = map(float, run.stdout.split())
    assert holes > full - 20, "the C library keeps it"
    assert after < full - 80
