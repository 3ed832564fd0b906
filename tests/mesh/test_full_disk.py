"""A key of file discovery is written as soon as a full disk has room again."""

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, because it gets a mount namespace.
SCRIPT = """
import asyncio, sys
from contextlib import suppress
from pathlib import Path
from kvmesh.lab.faults.room import PrivateRoom
from kvmesh.mesh.discovery.file import FileDiscovery

folder = Path(sys.argv[1])
if not PrivateRoom(folder).has_disk:
    sys.exit(77)

async def main() -> None:
    discovery = FileDiscovery(str(folder / "discovery"), lease_s=0.6)
    await discovery.put("workers/a", b"old")
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    await discovery.put("workers/a", b"new")
    await discovery.put("workers/b", b"first")
    await asyncio.sleep(0.5)
    print(sorted(path.name for path in (folder / "discovery").iterdir()))
    filler.unlink()
    watch = discovery.watch("workers/")
    seen = {}
    async with asyncio.timeout(10):
        while seen != {"workers/a": b"new", "workers/b": b"first"}:
            change = await anext(watch)
            seen[change.key] = change.value
    await discovery.close()

asyncio.run(main())
"""


def test_a_key_waits_for_room_on_a_full_disk(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip("a small disk needs root")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['workers%2Fa.key']", "nothing is left of what could not be written"
    assert done.stderr.count("is written when there is room") == 2, done.stderr
