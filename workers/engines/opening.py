"""Open the engine that the settings choose. The package of an engine is imported only then."""

from importlib import import_module

from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import Engine
from kvmesh.workers.engines.kind import EngineKind
from kvmesh.workers.engines.registry import ENGINES, OPTIONAL, check_taken


def open_engine(config: WorkerConfig) -> Engine:
    """Return the engine of these settings, not started. Raise ConfigError if they do not fit together or here."""
    kind = ENGINES[config.engine]
    check_settings(config, kind)
    engine: Engine = import_module(kind.opening).open_engine(config)
    return engine


def check_settings(config: WorkerConfig, kind: EngineKind) -> None:
    """Raise ConfigError for a setting or a role that the engine does not take."""
    if config.role not in kind.roles:
        roles = " or ".join(role.value for role in kind.roles)
        raise ConfigError(f"--engine {kind.name} has no role {config.role.value}", hint=f"set --role {roles}")
    defaults = WorkerConfig(model_path="")
    check_taken(kind, {name: getattr(config, name) != getattr(defaults, name) for name in OPTIONAL})
