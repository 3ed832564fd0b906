"""Let a worker in a process of its own fill a tier that outlives it, and kill it."""

import subprocess
import sys
from pathlib import Path

FILL = """
import asyncio, pathlib, sys
from {module} import started, use_twice

async def main():
    serving = await started(pathlib.Path(sys.argv[1]))
    await use_twice(serving)
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def fill_and_kill(module: str, folder: Path) -> None:
    """Start the worker of a test module over `folder`, and kill it with SIGKILL when its blocks are stored."""
    with subprocess.Popen(
        [sys.executable, "-c", FILL.format(module=module), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
