"""Run `kvmesh lab metrics-docs`: write the files that come from the list of metrics, or say which of them are old."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from kvmesh.lab.observability.dashboards import dashboard_files
from kvmesh.lab.observability.metrics_page import metrics_page
from kvmesh.mesh.config import load
from kvmesh.protocol.errors import ConfigError

ROOT = Path(__file__).parents[3]
RULES = "deploy/prometheus/rules.yml"
CHART = "deploy/helm/kvmesh/files"  # a chart can read only what lies in it


class MetricsDocsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `kvmesh lab metrics-docs`."""

    check: Annotated[bool, Meta(description="write nothing; fail if a file is not what would be written")] = False


def generated() -> dict[str, str]:
    """Return all generated files, by their path from the root of the repository."""
    boards = {f"deploy/grafana/dashboards/{name}": text for name, text in dashboard_files().items()}
    chart = {f"{CHART}/dashboards/{name}": text for name, text in dashboard_files().items()}
    rules = (ROOT / RULES).read_text(encoding="utf-8")
    return {"docs/metrics.md": metrics_page(), **boards, **chart, f"{CHART}/rules.yml": rules}


def outdated(root: Path = ROOT) -> list[str]:
    """Return the generated files that are missing or are not what would be written."""
    return [
        path
        for path, text in generated().items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]


def main(argv: list[str]) -> int:
    config = load(MetricsDocsConfig, argv, {}, prefix="KVMESH_METRICS_DOCS_", prog="kvmesh lab metrics-docs")
    if not (ROOT / "docs").is_dir():
        raise ConfigError(f"{ROOT} is no checkout of kvmesh", hint="run it in the repository")
    old = outdated()
    for path in old:
        print(f"{'old' if config.check else 'written'}: {path}")
        if not config.check:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(generated()[path], encoding="utf-8")
    return 1 if config.check and old else 0
