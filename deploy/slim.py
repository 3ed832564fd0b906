"""Take away what a finished virtual environment does not need in an image. Standard library only; Linux.

Called by deploy/Dockerfile: python slim.py FOLDER
"""

import shutil
import subprocess
import sys
from pathlib import Path

# Folders below site-packages: headers, programs and tests that no import reaches. nixl_ep is for expert-parallel GPUs.
UNUSED = (
    *("torch/include", "torch/bin", "torch/test", "torch/share"),
    *("nixl_ep", "nixl_ep_cu12"),
    *("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence.pth"),
)
TESTS = ("numpy", "sympy", "networkx", "mpmath", "aiohttp", "grpc")  # packages whose own tests are installed with them


def main(folder: str) -> None:
    [packages] = Path(folder).glob("lib/python3*/site-packages")
    before = size_of(packages)
    for name in UNUSED:
        remove(packages / name)
    for name in TESTS:
        for tests in sorted((packages / name).rglob("tests"), reverse=True):
            remove(tests)
    for leftover in (*packages.glob("pip-*"), *packages.glob("setuptools-*"), *Path(folder).glob("bin/pip*")):
        remove(leftover)
    for library in (*packages.rglob("*.so"), *packages.rglob("*.so.*")):
        if library.is_file() and not library.is_symlink() and not is_bundled(library):
            subprocess.run(["strip", "--strip-unneeded", str(library)], stderr=subprocess.DEVNULL, check=False)
    print(f"{packages}: {before >> 20} MiB, now {size_of(packages) >> 20} MiB")


def is_bundled(library: Path) -> bool:
    """Return whether a wheel carries a copy of a system's library: its layout was patched, and strip would break it."""
    return any(part.endswith(".libs") for part in library.parts)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


if __name__ == "__main__":
    main(sys.argv[1])
