"""Make .venv-lmcache for `make test-vllm`: LMCache on a CPU, over the packages of .venv-vllm. About 85 MB.

Called by the Makefile with the Python of .venv-vllm. The folder goes into PYTHONPATH.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / ".venv-lmcache"
REQUIREMENTS = ROOT / "deploy" / "lmcache-cpu.txt"
INSTALL = ["install", "--no-deps", "--upgrade", "--target", str(TARGET), "-r", str(REQUIREMENTS)]


def main() -> int:
    print(f"LMCache for the CPU, into {TARGET} ...", flush=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    if subprocess.run([*pip, *INSTALL], stdin=subprocess.DEVNULL, check=False).returncode:
        print("FAILED: what pip said stands above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
