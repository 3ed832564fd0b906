"""Planner, frontend and router of `kvmesh up` mean one SLO, unless somebody has set another for one of them."""

from pathlib import Path

from kvmesh.cluster.config import load_cluster
from kvmesh.cluster.processes import process_specs, read_frontend
from kvmesh.cluster.running import with_one_slo
from kvmesh.mesh.config import load
from kvmesh.planner.config import ServiceConfig
from kvmesh.router.config import RouterConfig

PLANNER = ServiceConfig(ttft_slo_s=0.7, itl_slo_s=0.03)


def slo_of(
    *argv: str, planner: ServiceConfig | None = PLANNER, file: str = "", environ: dict[str, str] | None = None
) -> tuple[float, float]:
    """Return the SLO (TTFT, ITL) that the frontend's process reads."""
    config = with_one_slo(load_cluster(argv, {}), planner, file, environ or {})
    read = read_frontend(config, file, environ or {})
    return read.slo_ttft_s, read.slo_itl_s


def router_slo_of(
    *argv: str, planner: ServiceConfig | None = PLANNER, file: str = "", environ: dict[str, str] | None = None
) -> float | None:
    """Return the ITL of the SLO that a router process reads."""
    config = with_one_slo(load_cluster(["--router", "remote", *argv], {}), planner, file, environ or {})
    spec = next(spec for spec in process_specs(config, Path("/run"), file) if spec.name == "router")
    flags = ["--config", file] if file else []
    own = {**(environ or {}), **spec.env}
    return load(RouterConfig, flags, own, prefix="KVMESH_ROUTER_", prog="router", section="router").slo_itl_s


def toml(folder: Path, text: str) -> str:
    file = folder / "mesh.toml"
    file.write_text(text)
    return str(file)


def test_the_frontend_counts_by_the_slo_of_the_planner() -> None:
    assert slo_of() == (0.7, 0.03)
    assert slo_of(planner=None) == (2.0, 0.1)


def test_limits_in_statements_are_handed_over_too() -> None:
    stated = ServiceConfig(slo=("p95 TTFT <= 1 s", "p90 ITL <= 40 ms"))
    assert slo_of(planner=stated) == (1.0, 0.04)


def test_what_is_set_for_the_frontend_wins(tmp_path: Path) -> None:
    assert slo_of("--slo-ttft-s", "2") == (2.0, 0.03)
    assert slo_of("--slo-itl-s", "0.1") == (0.7, 0.1)
    assert slo_of(environ={"KVMESH_FRONTEND_SLO_ITL_S": "0.1"}) == (0.7, 0.1)
    assert slo_of(file=toml(tmp_path, "[frontend]\nslo_ttft_s = 2.0\n")) == (2.0, 0.03)


def test_a_router_process_spares_answers_by_the_slo_of_the_frontend(tmp_path: Path) -> None:
    assert router_slo_of() == 0.03
    assert router_slo_of("--slo-itl-s", "0.2") == 0.2
    assert router_slo_of(environ={"KVMESH_FRONTEND_SLO_ITL_S": "0.2"}) == 0.2
    assert router_slo_of(planner=None) is None


def test_what_is_set_for_the_router_wins(tmp_path: Path) -> None:
    assert router_slo_of(environ={"KVMESH_ROUTER_SLO_ITL_S": "0"}) == 0
    assert router_slo_of(file=toml(tmp_path, "[router]\nslo_itl_s = 0.5\n")) == 0.5
