"""Run `kvmesh lab metrics-check`: metrics, dashboards and alerts against a running mesh and a real Prometheus."""

import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec
import yaml
from msgspec import Meta, Struct
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from kvmesh.lab.faults.mesh import make_folder, remove_folder
from kvmesh.lab.observability.dashboards import panel_queries
from kvmesh.lab.observability.named_faults import FAULTS, NamedFault
from kvmesh.lab.observability.prometheus import PrometheusProgram, PrometheusQueries, prometheus_program
from kvmesh.lab.observability.watched_mesh import WatchedMesh
from kvmesh.lab.observability.write import ROOT, RULES
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load
from kvmesh.mesh.lifecycle import run, unless_stopped
from kvmesh.mesh.metric_list import DECLARED, PROCESS_LABELS, metric_of
from kvmesh.protocol.errors import ConfigError

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_WINDOW = re.compile(r"\[(\w+)(:\w*)?\]")
LEAST_WINDOW_MS = 2000  # four scrapes


def duration_ms(text: str) -> float:
    """Return the milliseconds of a duration such as 5m or 1h30m."""
    return sum(float(number) * _UNITS_S[unit] * 1000 for number, unit in _DURATION.findall(text))


def scaled_expression(expression: str, scale: float) -> str:
    """Return a query whose windows are shorter by `scale`."""

    def shorter(match: re.Match[str]) -> str:
        length_ms = max(LEAST_WINDOW_MS, round(duration_ms(match[1]) / scale))
        return f"[{length_ms}ms{':500ms' if match[2] else ''}]"

    return _WINDOW.sub(shorter, expression)


def scaled_rules(text: str, scale: float) -> str:
    """Return a file of rules with `for:` and windows shorter by `scale`."""
    rules: dict[str, Any] = yaml.safe_load(text)
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["expr"] = scaled_expression(rule["expr"], scale)
            if "for" in rule:
                rule["for"] = f"{round(duration_ms(rule['for']) / scale)}ms"
    return yaml.safe_dump(rules, sort_keys=False, allow_unicode=True)


def alert_names(text: str) -> list[str]:
    """Return the alerts of a file of rules."""
    return [rule["alert"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"] if "alert" in rule]


OF_KINDS = frozenset({"le"})  # labels that the format itself adds


def exported(pages: Mapping[str, str]) -> tuple[set[str], list[str]]:
    """Return the declared metrics on the pages, and what on them is not declared: metrics, and labels of metrics."""
    found: set[str] = set()
    wrong: set[str] = set()
    for page in pages.values():
        for family in text_string_to_metric_families(page):
            if ":" in family.name:  # of an engine
                continue
            if (metric := metric_of(family.name)) is None:
                wrong.add(family.name)
                continue
            found.add(metric.name)
            known = {*metric.labels, *PROCESS_LABELS, *OF_KINDS}
            wrong |= {f"{metric.name}: label {label}" for s in family.samples for label in s.labels.keys() - known}
    return found, sorted(wrong)


def undeclared_names(names: Iterable[str]) -> list[str]:
    """Return the names of ours among those of a Prometheus server that no declared metric explains."""
    suffixes = ("", "_bucket", "_sum", "_count", "_created")
    return sorted(
        name
        for name in names
        if name.startswith(("kvmesh_", "gen_ai_"))
        and not any(name.endswith(suffix) and metric_of(name.removesuffix(suffix)) for suffix in suffixes)
    )


RULES_FILE = ROOT / RULES
RATE_WINDOW = "1m"  # of Grafana's $__rate_interval, before it is scaled
LOOK_S = 0.25
SCRAPE_MS = 500
LOADED_S = 8.0  # before the first fault
FIRES_S, ENDS_S = 60.0, 90.0
Tell = Callable[[str], None]


class MetricsCheckConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_METRICS_CHECK_<NAME>`, that over the TOML file of `--config`, that over the default."""

    scale: Annotated[
        float, Meta(ge=1, le=600, description="how many times shorter the windows and `for:` of the rules are")
    ] = 30.0
    faults: Annotated[
        bool, Meta(description="make the fault behind each alert; without it only panels are checked")
    ] = True
    url: Annotated[str, Meta(description="check names and panels on this Prometheus server, and start nothing")] = ""


class MetricsReport(Struct, kw_only=True):
    """Hold what was found. Lists name what is wrong."""

    declared: int = len(DECLARED)
    exported: int = 0
    undeclared: int = 0
    panels: int = 0
    panels_empty: int = 0
    alerts: int = 0
    alerts_fired: int = 0
    alerts_stuck: int = 0
    seconds: float = 0.0
    problems: list[str] = []

    @property
    def is_good(self) -> bool:
        return not (self.undeclared or self.panels_empty or self.alerts_stuck or self.alerts_fired != self.alerts)


def main(argv: list[str]) -> int:
    config = load(
        MetricsCheckConfig,
        argv,
        os.environ,
        prefix="KVMESH_METRICS_CHECK_",
        prog="kvmesh lab metrics-check",
        description="Start a mesh and a Prometheus server, and check the metrics, the dashboards and the alerts.",
        section="metrics_check",
    )
    if not RULES_FILE.is_file():
        raise ConfigError(f"{RULES_FILE} is missing", hint="run this in a checkout of kvmesh")
    if not config.url and prometheus_program() is None:
        raise ConfigError("there is no Prometheus server here", hint="apt-get install prometheus, or give --url")
    console = Console(stderr=config.json, highlight=False)
    started_s = time.monotonic()

    def tell(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started_s:6.1f} s[/dim]  {line}", soft_wrap=True)

    report = MetricsReport()

    async def check(stop: asyncio.Event) -> None:
        checking = check_server(config, report) if config.url else check_mesh(config, report, tell)
        await unless_stopped(checking, stop)

    code = run(check)
    report.seconds = round(time.monotonic() - started_s, 1)
    show(report, config, console)
    return code or (0 if report.is_good else 1)


def show(report: MetricsReport, config: MetricsCheckConfig, console: Console) -> None:
    for problem in report.problems:
        console.print(problem, soft_wrap=True, markup=False)
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    else:
        console.print(str(msgspec.to_builtins(report)), soft_wrap=True, markup=False)


async def check_server(config: MetricsCheckConfig, report: MetricsReport) -> None:
    """Check names, panels and loaded alerts of somebody's Prometheus server, without any fault."""
    async with aiohttp.ClientSession() as http:
        queries = PrometheusQueries(http, config.url)
        names = await queries.metric_names()
        wrong = undeclared_names(name for name in names if not name.startswith("kvmesh:"))
        report.exported = len([name for name in DECLARED if {name, f"{name}_count"} & names])
        report.undeclared = len(wrong)
        report.problems += [f"not declared: {name}" for name in wrong]
        await check_panels(queries, report, Panels(1.0))
        missing = set(alert_names(RULES_FILE.read_text())) - await queries.alert_rules()
        report.problems += [f"no such alert on the server: {name}" for name in sorted(missing)]


async def check_mesh(config: MetricsCheckConfig, report: MetricsReport, tell: Tell) -> None:
    """Check a mesh and a Prometheus server of our own."""
    folder = Path(tempfile.mkdtemp(prefix="kvmesh-metrics-"))
    make_folder(folder)
    mesh = WatchedMesh(folder, lambda line: None)
    rules = RULES_FILE.read_text(encoding="utf-8")
    async with aiohttp.ClientSession() as http:
        server: PrometheusProgram | None = None
        try:
            await mesh.start()
            tell("the mesh runs")
            server = PrometheusProgram(
                folder / "prometheus", list(mesh.jobs()), scaled_rules(rules, config.scale), SCRAPE_MS
            )
            await server.start(http)
            queries, panels = PrometheusQueries(http, server.url), Panels(config.scale)
            await asyncio.sleep(LOADED_S)
            await check_panels(queries, report, panels)
            if config.faults:
                await check_alerts(mesh, queries, report, tell, alert_names(rules))
                await check_panels(queries, report, panels)
            tell_names(report, await mesh.pages())
        finally:
            await mesh.close()
            if server is not None:
                await server.close()
            remove_folder(folder)
    report.problems += [f"the panel is empty: {name}" for name in panels.empty]


def tell_names(report: MetricsReport, pages: dict[str, str]) -> None:
    found, wrong = exported(pages)
    report.exported, report.undeclared = len(found), len(wrong)
    report.problems += [f"not declared: {name}" for name in wrong]


class Panels:
    """Remembers which panels have shown something."""

    def __init__(self, scale: float) -> None:
        self._waiting = [
            (panel, scaled_expression(query.replace("$__rate_interval", RATE_WINDOW), scale))
            for panel, query in panel_queries()
        ]
        self.count = len({panel for panel, _ in self._waiting})

    @property
    def empty(self) -> list[str]:
        """The panels of which a query has shown nothing."""
        return sorted({panel for panel, _ in self._waiting})

    async def look(self, queries: PrometheusQueries) -> None:
        self._waiting = [(panel, query) for panel, query in self._waiting if not await queries.has_values(query)]


async def check_panels(queries: PrometheusQueries, report: MetricsReport, panels: Panels) -> None:
    """Run the query of every panel that was empty so far."""
    await panels.look(queries)
    report.panels, report.panels_empty = panels.count, len(panels.empty)


async def check_alerts(
    mesh: WatchedMesh, queries: PrometheusQueries, report: MetricsReport, tell: Tell, names: list[str]
) -> None:
    """Make each fault, and wait for its alerts to fire; then for all alerts to be silent."""
    report.alerts = len(names)
    fired: set[str] = set()
    for fault in FAULTS:
        fired |= await check_fault(mesh, queries, fault, tell)
    report.alerts_fired = len(fired & set(names))
    report.problems += [f"never fired for its fault: {name}" for name in names if name not in fired]
    stuck = await until_silent(queries, set(names), ENDS_S)
    report.alerts_stuck = len(stuck)
    report.problems += [f"still fires after its fault: {name}" for name in sorted(stuck)]
    tell("all alerts are silent again" if not stuck else f"still firing: {', '.join(sorted(stuck))}")


async def check_fault(mesh: WatchedMesh, queries: PrometheusQueries, fault: NamedFault, tell: Tell) -> set[str]:
    """Return which alerts of a fault were silent before it and fired during it."""
    if fault.is_new:
        loud = await until_silent(queries, set(fault.alerts), ENDS_S)
        if loud:
            tell(f"before its fault: {', '.join(sorted(loud))}")
            return set()
    tell(fault.what)
    await fault.begin(mesh)
    fired: set[str] = set()
    ends_s = time.monotonic() + FIRES_S
    while fired != set(fault.alerts) and time.monotonic() < ends_s:
        await asyncio.sleep(LOOK_S)
        fired |= await queries.firing() & set(fault.alerts)
    await fault.end(mesh)
    tell(f"  fired: {', '.join(sorted(fired)) or 'nothing'}")
    return fired


async def until_silent(queries: PrometheusQueries, names: set[str], timeout_s: float) -> set[str]:
    """Wait until none of the alerts fires. Return those that still do at the end."""
    ends_s = time.monotonic() + timeout_s
    while True:
        loud = await queries.firing() & names
        if not loud or time.monotonic() > ends_s:
            return loud
        await asyncio.sleep(LOOK_S)
