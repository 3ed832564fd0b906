"""Take away what a finished virtual environment does not need in an image. Standard library only; Linux.

Called by deploy/Dockerfile: python slim.py FOLDER MODULE... Bytecode is kept for what these modules import, and for
nothing else: a worker's torch has 130 MiB of it, of which a start reads a fifth.
"""

import py_compile
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Folders below site-packages: headers, programs and tests that no import reaches. nixl_ep is for expert-parallel GPUs.
UNUSED = (
    *("torch/include", "torch/test", "torch/share"),
    *("nixl_ep", "nixl_ep_cu12"),
    "hf_xet",  # speeds up downloads from the hub, which no service makes
    *("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence.pth"),
)
METADATA = ("pip-*", "setuptools-*", "hf_xet-*")
TESTS = ("numpy", "sympy", "networkx", "mpmath", "aiohttp", "grpc")  # packages whose own tests are installed with them
LOADED = "import sys, {modules}; print(*{{m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)}})"


def main(folder: str, modules: Sequence[str]) -> None:
    [packages] = Path(folder).glob("lib/python3*/site-packages")
    before = size_of(packages)
    for name in UNUSED:
        remove(packages / name)
    for name in TESTS:
        for tests in sorted((packages / name).rglob("tests"), reverse=True):
            remove(tests)
    for program in packages.glob("torch/bin/*"):
        if program.name != "torch_shm_manager":
            remove(program)
    for pattern in METADATA:
        for leftover in packages.glob(pattern):
            remove(leftover)
    for program in Path(folder).glob("bin/pip*"):
        remove(program)
    strip(packages)
    keep_bytecode_of(folder, packages, modules)
    print(f"{packages}: {before >> 20} MiB, now {size_of(packages) >> 20} MiB")


def strip(packages: Path) -> None:
    """Remove debugging symbols, except from a system's libraries in a wheel: those were patched, and would break."""
    for library in (*packages.rglob("*.so"), *packages.rglob("*.so.*")):
        is_bundled = any(part.endswith(".libs") for part in library.parts)
        if library.is_file() and not library.is_symlink() and not is_bundled:
            subprocess.run(["strip", "--strip-unneeded", str(library)], stderr=subprocess.DEVNULL, check=False)


def keep_bytecode_of(folder: str, packages: Path, modules: Sequence[str]) -> None:
    """Compile what the modules load, once and for all: times of files may change on the way into an image."""
    for cache in sorted(packages.rglob("__pycache__"), reverse=True):
        remove(cache)
    command = [f"{folder}/bin/python", "-B", "-c", LOADED.format(modules=", ".join(modules))]
    for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split():
        if name.endswith(".py") and name.startswith(str(packages)):
            py_compile.compile(name, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
