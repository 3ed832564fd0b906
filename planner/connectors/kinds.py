"""The kinds of connectors: those of the core, and those of extensions. Their settings are in planner/config.py.

Every kind passes tests/contracts/test_planner_connectors.py.
"""

from collections.abc import Mapping

from kvmesh.mesh.extensions import load
from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.connectors import compose, dry_run, local, virtual
from kvmesh.planner.connectors.connector import Connector, ConnectorKind, Present
from kvmesh.protocol.errors import ConfigError

_KINDS = (
    ConnectorKind("local", local.open_connector, can_flip=True),
    ConnectorKind("compose", compose.open_connector, can_flip=False),
    *load("connector"),
    ConnectorKind("virtual", virtual.open_connector, can_flip=True),  # if the orchestrator can
    ConnectorKind("dry-run", dry_run.open_connector, can_flip=True),
)
KINDS: Mapping[str, ConnectorKind] = {kind.name: kind for kind in _KINDS}


def kind_of(config: ServiceConfig) -> ConnectorKind:
    """Return the kind that the settings choose. Raise ConfigError if this installation lacks it."""
    if (kind := KINDS.get(config.connector)) is None:
        raise ConfigError(f"no connector {config.connector!r}", hint=f"use {' or '.join(KINDS)}")
    return kind


async def open_connector(config: ServiceConfig, present: Present) -> Connector:
    """Return the connector of these settings. Raise ConfigError if they do not fit together."""
    return await kind_of(config).open(config, present)
