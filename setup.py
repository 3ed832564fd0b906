"""Build the native extensions. All other settings of the package are in pyproject.toml.

Where an extension cannot be built (no C++ compiler, no Python.h, no nanobind) kvmesh installs without it and runs its
plain Python instead.
"""

import sys
from glob import glob

from setuptools import Extension, setup

try:
    import nanobind
except ImportError:  # a build without isolation; in all others [build-system] of pyproject.toml brings nanobind
    nanobind = None
    print("kvmesh: nanobind is not installed, so the index of the router is built without native code", file=sys.stderr)

FLAGS = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]


def extension(folder: str, sources: list[str], include_dirs: list[str], flags: list[str]) -> Extension:
    return Extension(
        f"kvmesh.{folder.replace('/', '.')}._native",
        sources,
        include_dirs=include_dirs,
        depends=[*glob("protocol/*.h"), *glob("*/native/*.h"), *glob("workers/engines/torch/native/*.h")],
        extra_compile_args=[*FLAGS, *flags],
        language="c++",
        optional=True,
    )


def raw(folder: str) -> Extension:
    """Return an extension written against Python's own C API."""
    return extension(folder, [f"{folder}/_native.cpp"], [], [])


def bound_by_nanobind(folder: str) -> Extension:
    """Return an extension that nanobind binds. nanobind is compiled into it and is no dependency at run time."""
    include = nanobind.include_dir()
    return extension(
        folder,
        [f"{folder}/_native.cpp", f"{folder}/_nanobind.cpp"],
        [include, f"{include}/../ext/robin_map/include", nanobind.source_dir()],
        ["-DNB_COMPACT_ASSERTIONS"],
    )


def torch_engine() -> Extension:
    """Return the kernels of the torch engine. Linked with no OpenMP library: they use the one that torch has loaded."""
    vectors = ["-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi"]
    gcc_12 = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # it warns of its own header of AVX-512
    return extension("workers/engines/torch", ["workers/engines/torch/_native.cpp"], [], [*vectors, *gcc_12])


setup(
    ext_modules=[
        raw("protocol"),
        raw("frontend"),
        torch_engine(),
        *([bound_by_nanobind("router")] if nanobind else []),
    ]
)
