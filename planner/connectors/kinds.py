"""The kinds of connectors. A new one is a module here, an entry in `KINDS`, and its settings in planner/config.py.

Every kind passes tests/contracts/test_planner_connectors.py.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.connectors import compose, dry_run, kubernetes, local, virtual
from kvmesh.planner.connectors.connector import Connector, Present


@dataclass(frozen=True, slots=True)
class ConnectorKind:
    """A way to open a connector. `can_flip`: the connector can turn a worker of one role into one of the other."""

    open: Callable[[ServiceConfig, Present], Awaitable[Connector]]
    can_flip: bool


KINDS: Mapping[str, ConnectorKind] = {
    "local": ConnectorKind(local.open_connector, can_flip=True),
    "compose": ConnectorKind(compose.open_connector, can_flip=False),
    "kubernetes": ConnectorKind(kubernetes.open_connector, can_flip=False),
    "virtual": ConnectorKind(virtual.open_connector, can_flip=True),  # if the orchestrator can
    "dry-run": ConnectorKind(dry_run.open_connector, can_flip=True),
}


async def open_connector(config: ServiceConfig, present: Present) -> Connector:
    """Return the connector of these settings. Raise ConfigError if they do not fit together."""
    return await KINDS[config.connector].open(config, present)
