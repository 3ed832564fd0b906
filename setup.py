"""The native part; all the rest stands in pyproject.toml.

Where it cannot be built (no C++ compiler, no Python.h) kvmesh installs without it and runs its plain Python instead.
"""

from glob import glob

from setuptools import Extension, setup


def native(package: str) -> Extension:
    return Extension(
        f"{package}._native",
        [f"{package}/_native.cpp"],
        depends=[*glob("protocol/*.h"), *glob("router/native/*.h")],
        extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"],
        language="c++",
        optional=True,
    )


setup(ext_modules=[native("protocol"), native("router"), native("frontend")])
