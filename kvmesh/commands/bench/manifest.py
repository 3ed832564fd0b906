"""Say what a run was made with: versions, settings, hardware, seed."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from shlex import join

import msgspec
import psutil

from kvmesh.commands.bench.config import ServeBenchConfig
from kvmesh.commands.bench.machine import cpu_name
from kvmesh.commands.bench.results import SCHEMA, Manifest
from kvmesh.protocol.version import RELEASE

PACKAGES = ("httptools", "msgspec", "numpy", "tokenizers", "uvloop")


def manifest_of(config: ServeBenchConfig, argv: Sequence[str], driver_version: str) -> Manifest:
    """Return the manifest. Keys are left out of it."""
    settings = {**msgspec.to_builtins(config), "api_key": "(given)" if config.api_key else ""}
    return Manifest(
        schema=SCHEMA,
        kvmesh=RELEASE,
        driver=config.driver,
        driver_version=driver_version or RELEASE,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=join(["kvmesh", "bench", "serve", *without_key(argv)]),
        settings=settings,
        seed=config.seed,
        python=platform.python_version(),
        packages={name: version for name in PACKAGES if (version := _version(name))},
        system=platform.platform(),
        cpu=cpu_name(),
        cores=os.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=_gpus(),
    )


def without_key(argv: Sequence[str]) -> list[str]:
    shown: list[str] = []
    for word in argv:
        if shown and shown[-1] == "--api-key":
            shown.append("...")
        else:
            shown.append("--api-key=..." if word.startswith("--api-key=") else word)
    return shown


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _gpus() -> list[str]:
    """Return the GPUs of this machine, which need not be that of an endpoint."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        print(f"nvidia-smi does not answer: {error}", file=sys.stderr)
        return []
    return [line.strip() for line in said.splitlines() if line.strip()]
