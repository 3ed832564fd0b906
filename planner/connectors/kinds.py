"""From settings to a connector. Each kind is imported only when it is asked for."""

from collections.abc import Callable

from planner.config import ServiceConfig, decoding_role
from planner.connectors.connector import Connector, Fleets


async def open_connector(config: ServiceConfig, present: Callable[[], Fleets]) -> Connector:
    """`present`: who has joined the mesh, for those that see nothing else. Raises ConfigError."""
    is_split = config.mode == "disaggregated"
    match config.connector:
        case "local":
            from planner.connectors.local import LocalConnector

            return LocalConnector(config.local_control, decoding_role(config))
        case "compose":
            from planner.connectors.compose import ComposeConnector

            return ComposeConnector(
                config.compose_command,
                config.compose_files,
                config.compose_project,
                prefill=config.compose_prefill if is_split else "",
                decode=config.compose_decode,
            )
        case "kubernetes":
            from planner.connectors.kubernetes import KubernetesConnector, account_of

            account = account_of(config.kubernetes_account, config.kubernetes_url, config.kubernetes_namespace)
            prefill = config.kubernetes_prefill if is_split else ""
            return KubernetesConnector(account, prefill=prefill, decode=config.kubernetes_decode)
        case "virtual":
            from planner.connectors.virtual import VirtualConnector, read_token

            virtual = VirtualConnector(present, config.virtual_timeout_s, read_token(config.virtual_token_file))
            await virtual.start(config.virtual_host, config.virtual_port)
            return virtual
        case "dry-run":
            from planner.connectors.dry_run import DryRunConnector

            return DryRunConnector(present)
