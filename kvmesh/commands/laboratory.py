"""Run `kvmesh lab <name>`: the laboratory of a checkout, which no wheel has."""

import importlib
import importlib.util

from kvmesh.protocol.errors import ConfigError


def main(argv: list[str]) -> int:
    """Raise ConfigError where kvmesh is installed without its laboratory."""
    if importlib.util.find_spec("kvmesh.lab") is None:
        raise ConfigError(
            "this kvmesh has no laboratory: it is not in the wheel",
            hint="clone the repository, and run `python -m kvmesh lab` there",
        )
    return int(importlib.import_module("kvmesh.lab.commands").main(argv))
