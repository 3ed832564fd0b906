"""The names in a worker's settings: of the worker, of its model, of its adapters. Pure."""

import secrets
from pathlib import Path

import msgspec

from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.config import WorkerConfig


def worker_name(config: WorkerConfig) -> str:
    return config.name or config.role.value


def with_name(config: WorkerConfig) -> WorkerConfig:
    """Return the settings with a name: two workers that are given none must not seem to be one."""
    if config.name:
        return config
    return msgspec.structs.replace(config, name=f"{config.role.value}-{secrets.token_hex(2)}")


def served_name(config: WorkerConfig) -> str:
    """Return the name that clients ask for the model by."""
    return config.model or Path(config.model_path).resolve().name


def adapter_names(config: WorkerConfig) -> tuple[str, ...]:
    """Return the names in --loras. Raise ConfigError for one that is given twice, or called as the model is."""
    names = tuple(name for part in config.loras.split(",") if (name := part.strip()))
    for i, name in enumerate(names):
        if name == served_name(config) or name in names[:i]:
            raise ConfigError(f"--loras names {name!r}, which is taken", hint="give every adapter a name of its own")
    return names
