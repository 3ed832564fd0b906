"""One SLO for a mesh on one host: for its planner, for its frontend and for its router."""

from collections.abc import Mapping
from dataclasses import replace

from kvmesh.cluster.config import ClusterConfig
from kvmesh.cluster.processes import frontend_argv, read_frontend
from kvmesh.frontend.config import FrontendConfig
from kvmesh.mesh.config import environ_of, load_given
from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.slo import with_slo
from kvmesh.router.config import RouterConfig
from kvmesh.router.rules import DEFAULT_SLO_ITL_S


def with_one_slo(
    config: ClusterConfig, planner: ServiceConfig | None, config_file: str, environ: Mapping[str, str]
) -> ClusterConfig:
    """Return the settings with the planner's SLO for the frontend, and with the frontend's for a router process.

    What somebody has set wins: by a flag, in the environment or in a table of the file. An embedded router takes the
    frontend's SLO by itself. Raises ConfigError.
    """
    if planner is not None:
        planned = with_slo(planner, planner.slo, planner.aim)
        slo = {"slo_ttft_s": planned.ttft_slo_s, "slo_itl_s": planned.itl_slo_s}
        argv = frontend_argv(config, config_file)
        names = load_given(
            FrontendConfig, argv, environ, prefix="KVMESH_FRONTEND_", prog="frontend", section="frontend"
        )
        config = replace(config, frontend={name: slo[name] for name in slo if name not in names} | {**config.frontend})
    if config.up.router == "remote":
        argv = ["--config", config_file] if config_file else []
        own = {**environ, **environ_of(config.router, "KVMESH_ROUTER_")}
        names = load_given(RouterConfig, argv, own, prefix="KVMESH_ROUTER_", prog="router", section="router")
        slo_itl_s = read_frontend(config, config_file, environ).slo_itl_s
        if "slo_itl_s" not in names and slo_itl_s != DEFAULT_SLO_ITL_S:
            config = replace(config, router={**config.router, "slo_itl_s": slo_itl_s})
    return config
