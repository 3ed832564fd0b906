"""Register Kubernetes as a connector of the planner."""

from kvmesh.planner.connectors.connector import ConnectorKind
from kvmesh.planner.connectors.kubernetes.connector import open_connector

EXTENSION = ConnectorKind("kubernetes", open_connector, can_flip=False)
