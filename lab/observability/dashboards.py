"""Grafana's dashboards as code. Pure: `kvmesh lab metrics-docs` writes the JSON files.

In a query, `$N` stands for the labels that choose a mesh, `$M` for those that choose a mesh and a model.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_MESH = 'namespace=~"$namespace"'
_MODEL = _MESH + ',model=~"$model"'
_ALL = {"$namespace": ".*", "$model": ".*"}
WIDTH = 24


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class DashboardPanel:
    """One panel. `unit` is Grafana's name of a unit."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    about: str = ""
    kind: str = "timeseries"  # or stat, table
    width: int = 8
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    panels: tuple[DashboardPanel, ...]


def _panel(title: str, unit: str, *queries: tuple[str, str], about: str = "", **more: Any) -> DashboardPanel:
    return DashboardPanel(title, unit, tuple(Query(*query) for query in queries), about, **more)


def _stat(title: str, unit: str, expression: str, about: str = "", **more: Any) -> DashboardPanel:
    return DashboardPanel(title, unit, (Query(expression),), about, "stat", 4, **more)


def _share(title: str, *queries: tuple[str, str], about: str = "") -> DashboardPanel:
    return _panel(title, "percentunit", *queries, about=about, most=1.0)


def _quantile(share: float, metric: str, by: str = "", labels: str = "$M") -> str:
    grouped = ", ".join(filter(None, ["le", by]))
    return f"histogram_quantile({share}, sum by ({grouped}) (rate({metric}_bucket{{{labels}}}[$__rate_interval])))"


def _quantiles(title: str, unit: str, metric: str, about: str = "", labels: str = "$M") -> DashboardPanel:
    return _panel(
        title,
        unit,
        *((_quantile(share, metric, labels=labels), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)),
        about=about,
    )


def _rate(metric: str, by: str, labels: str = "$N", otherwise: bool = False) -> str:
    """Return a rate. `otherwise`: 0 where nothing of the kind has happened yet."""
    found = f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"
    return f"{found} or vector(0)" if otherwise else found


_F, _R, _W, _P = "kvmesh_frontend_", "kvmesh_router_", "kvmesh_worker_", "kvmesh_planner_"

_SLO = _share(
    "SLO attainment",
    ("kvmesh:slo_attainment:share5m{$M}", "{{model}}"),
    about="Share of requests that kept --slo-ttft-s and --slo-itl-s. Failed ones count, clients that left do not.",
)
_HITS = _share("Prompt tokens from a cache", ("kvmesh:cached_tokens:share5m{$M}", "{{model}}"))
_KV = _share("KV blocks in use", ("kvmesh:kv_blocks_used:share{$M}", "{{model}} {{role}}"))
_BALANCE = _panel(
    "Prefill against decode",
    "none",
    ("kvmesh:prefill_decode:balance5m{$M}", "{{model}}"),
    about="1: only prefill workers are busy, -1: only decode workers. Far from 0 for long: change their ratio.",
)
_RATE = _panel("Requests by outcome", "reqps", (_rate(_F + "requests_total", "outcome", "$M"), "{{outcome}}"))
_TTFT = _quantiles("TTFT", "s", _F + "ttft_seconds", "Request received to first token sent.")
_ITL = _quantiles("ITL", "s", _F + "itl_seconds", "Mean gap between the tokens of one answer.")

OVERVIEW = Dashboard(
    "kvmesh-overview",
    "kvmesh: operator's overview",
    (
        _stat("Worst SLO attainment", "percentunit", "min(kvmesh:slo_attainment:share5m{$M})"),
        _stat("Goodput", "reqps", "sum(kvmesh:goodput_requests:rate5m{$M})", "Requests per second that keep the SLO."),
        _stat("TTFT p95", "s", "max(kvmesh:ttft_seconds:p95_5m{$M})"),
        _stat("Waiting", "short", "sum(kvmesh_router_waiting{$M})", "Requests that no worker has room for."),
        _stat("Processes that do not answer", "short", 'count(up{job=~".*kvmesh-.*"} == 0) or vector(0)'),
        _stat("Alerts that fire", "short", 'count(ALERTS{alertname=~"Kvmesh.*",alertstate="firing"}) or vector(0)'),
        _SLO,
        _RATE,
        _HITS,
        _KV,
        _BALANCE,
        _panel(
            "Failed and refused",
            "reqps",
            (_rate(_F + "requests_total", "outcome", '$M,outcome!~"ok|client_gone"', True), "{{outcome}}"),
        ),
    ),
)
MESH = Dashboard(
    "kvmesh-mesh",
    "kvmesh: mesh",
    (
        _stat("Models ready", "short", f"max({_F}models_ready{{$N}})"),
        _stat("Workers", "short", f"sum(max by (model, role) ({_R}workers{{$M}}))"),
        _stat("Requests in progress", "short", f"sum({_F}inflight{{$N}})"),
        _stat("Workers kept down", "short", f"max({_F}workers_down{{$N}})"),
        _stat("Lapsed workers", "short", f"max({_R}lapsed_workers{{$N}})"),
        _stat("Shortest certificate", "s", "min(kvmesh_tls_certificate_expiry_seconds{$N})"),
        _panel("Workers by role", "short", (f"max by (model, role) ({_R}workers{{$M}})", "{{model}} {{role}}")),
        _panel(
            "Releases", "short", ("count by (version, component) (kvmesh_build_info{$N})", "{{version}} {{component}}")
        ),
        _panel(
            "CPU", "short", (_rate("process_cpu_seconds_total", "component, instance"), "{{component}} {{instance}}")
        ),
        _panel("Resident memory", "bytes", ("process_resident_memory_bytes{$N}", "{{component}} {{instance}}")),
        _panel(
            "Connections of the request plane", "short", ("kvmesh_plane_connections{$N}", "{{component}} {{instance}}")
        ),
        _panel(
            "Bytes waiting in the request plane",
            "bytes",
            ("sum by (component) (kvmesh_plane_unsent_bytes{$N})", "unsent {{component}}"),
            ("sum by (component) (kvmesh_plane_assembling_bytes{$N})", "incomplete {{component}}"),
        ),
        _panel(
            "Connections hung up", "cps", (_rate("kvmesh_plane_hangups_total", "reason", otherwise=True), "{{reason}}")
        ),
        _panel(
            "TLS handshakes", "cps", (_rate("kvmesh_tls_handshakes_total", "outcome", otherwise=True), "{{outcome}}")
        ),
        _panel("Open files", "short", ("process_open_fds{$N}", "{{component}} {{instance}}")),
    ),
)
FRONTEND = Dashboard(
    "kvmesh-frontend",
    "kvmesh: frontend",
    (
        _TTFT,
        _ITL,
        _quantiles("Request duration", "s", _F + "request_duration_seconds"),
        _RATE,
        _panel("Requests by endpoint", "reqps", (_rate(_F + "requests_total", "endpoint", "$M"), "{{endpoint}}")),
        _panel("In progress", "short", (f"sum by (instance) ({_F}inflight{{$N}})", "{{instance}}")),
        _SLO,
        _panel("What missed the SLO", "reqps", (_rate(_F + "slo_requests_total", "missed", "$M"), "{{missed}}")),
        _panel(
            "Tokens",
            "short",
            (f"sum(rate({_F}input_sequence_tokens_sum{{$M}}[$__rate_interval]))", "prompt"),
            (f"sum(rate({_F}output_sequence_tokens_sum{{$M}}[$__rate_interval]))", "answer"),
            (f"sum(rate({_F}cached_tokens_total{{$M}}[$__rate_interval]))", "prompt, cached"),
            about="Tokens per second.",
        ),
        _quantiles("Prompt length", "short", _F + "input_sequence_tokens"),
        _quantiles("Answer length", "short", _F + "output_sequence_tokens"),
        _panel("Migrations", "ops", (_rate(_F + "migrations_total", "model", "$M"), "{{model}}")),
        _panel("Suspect requests", "ops", (_rate(_F + "suspects_total", "verdict", otherwise=True), "{{verdict}}")),
        _share(
            "Tokenizer cache",
            (
                f'sum(rate({_F}tokenizer_cache_pieces_total{{$N,found="yes"}}[$__rate_interval])) '
                f"/ sum(rate({_F}tokenizer_cache_pieces_total{{$N}}[$__rate_interval]))",
                "found",
            ),
        ),
        _panel("Requests of API keys", "reqps", (_rate(_F + "key_requests_total", "key", otherwise=True), "{{key}}")),
        _panel(
            "Over a limit of a key",
            "reqps",
            (_rate(_F + "key_refused_total", "key, limit", otherwise=True), "{{key}} {{limit}}"),
        ),
        _panel("Stored responses", "short", (f"max({_F}responses_stored{{$N}})", "stored")),
    ),
)
ROUTER = Dashboard(
    "kvmesh-router",
    "kvmesh: router and cache",
    (
        _panel("Placements", "reqps", (_rate(_R + "placements_total", "kind, model", "$M"), "{{model}} {{kind}}")),
        _quantiles("Time to choose workers", "s", _R + "place_seconds", labels="$N"),
        _quantiles("Wait before placement", "s", _R + "wait_seconds", labels="$N"),
        _panel("Waiting", "short", (f"sum by (model) ({_R}waiting{{$M}})", "{{model}}")),
        _panel("Bookings", "short", (f"sum by (instance) ({_R}in_flight{{$N}})", "{{instance}}")),
        _panel("Refused for the load", "reqps", (_rate(_R + "refusals_total", "reason", otherwise=True), "{{reason}}")),
        _share(
            "Cached tokens: believed and found",
            (
                f"sum(rate({_R}predicted_reuse_tokens_total{{$N}}[$__rate_interval])) "
                f"/ sum(rate({_R}prompt_tokens_total{{$N}}[$__rate_interval]))",
                "believed",
            ),
            (
                f"sum(rate({_R}reused_tokens_total{{$N}}[$__rate_interval])) "
                f"/ sum(rate({_R}prompt_tokens_total{{$N}}[$__rate_interval]))",
                "found",
            ),
            about="Far apart: the index does not know what workers hold.",
        ),
        _panel("Prefixes in the index", "short", (f"max by (model) ({_R}index_blocks{{$M}})", "{{model}}")),
        _panel("KV events", "ops", (f"sum(rate({_R}kv_events_total{{$N}}[$__rate_interval]))", "applied")),
        _panel("Followed KV events", "short", (f"max by (state) ({_R}kv_feeds{{$N}})", "{{state}}")),
        _panel("Mended KV events", "ops", (_rate(_R + "kv_recoveries_total", "what"), "{{what}}")),
        _panel("Orphan blocks", "short", (f"max by (model) ({_R}index_orphan_blocks{{$M}})", "{{model}}")),
        _panel(
            "Estimates against what came",
            "none",
            (_quantile(0.5, _R + "estimate_error", "of", "$N"), "{{of}} token, median"),
            about="1: the time to a token was as estimated.",
        ),
        _panel(
            "Placed without a router",
            "reqps",
            (f"sum(rate({_R}fallbacks_total{{$N}}[$__rate_interval]))", "fallbacks"),
            about="Frontends place requests themselves while no router answers.",
        ),
        _panel("Other routers", "short", (f"{_R}peers{{$N}}", "{{instance}}")),
    ),
)
WORKERS = Dashboard(
    "kvmesh-workers",
    "kvmesh: workers",
    (
        _panel("Requests in the batch", "short", (_W + "running_requests{$M}", "{{worker}}")),
        _panel("Requests waiting", "short", (_W + "waiting_requests{$M}", "{{worker}}")),
        _panel("Prompt tokens to compute", "short", (_W + "queued_tokens{$M}", "{{worker}}")),
        _share("KV blocks in use", (f"{_W}used_blocks{{$M}} / {_W}total_blocks{{$M}}", "{{worker}}")),
        _share("KV blocks with a reusable prefix", (f"{_W}cached_blocks{{$M}} / {_W}total_blocks{{$M}}", "{{worker}}")),
        _panel("KV offers that wait", "short", (_W + "kv_offers{$M}", "{{worker}}")),
        _panel(
            "Tokens computed",
            "short",
            (_rate(_W + "step_tokens_total", "worker", "$M"), "{{worker}}"),
            about="Per second.",
        ),
        _panel(
            "Step time p95",
            "s",
            (_quantile(0.95, _W + "step_seconds", "role"), "{{role}}"),
            about="Of one forward step.",
        ),
        _panel("Without progress", "s", (_W + "stalled_seconds{$M}", "{{worker}}")),
        _panel("KV pulls", "ops", (_rate(_W + "kv_pulls_total", "backend, outcome", "$M"), "{{backend}} {{outcome}}")),
        _panel("KV pulled", "Bps", ("kvmesh:kv_pulled_bytes:rate5m{$M}", "{{model}} {{backend}}")),
        _quantiles("Pull time", "s", _W + "kv_pull_seconds"),
        _panel("Requests ended", "reqps", (_rate(_W + "requests_total", "outcome", "$M"), "{{outcome}}")),
        _share("Busy", ("kvmesh:workers_busy:share5m{$M}", "{{model}} {{role}}")),
        _panel(
            "Late steps and role changes",
            "ops",
            (f"sum(rate({_W}hesitations_total{{$M}}[$__rate_interval]))", "late steps"),
            (f"sum(rate({_W}role_changes_total{{$N}}[$__rate_interval])) or vector(0)", "role changes"),
        ),
    ),
)
PLANNER = Dashboard(
    "kvmesh-planner",
    "kvmesh: planner",
    (
        _panel(
            "Requests per second: forecast and observed",
            "reqps",
            (_P + "predicted_requests_per_second{$N}", "forecast"),
            (_P + "observed_requests_per_second{$N}", "observed"),
        ),
        _panel(
            "Workers",
            "short",
            (f"sum by (role) ({_P}replicas{{$N}})", "{{role}}: there are"),
            (_P + "target_replicas{$N}", "{{role}}: ordered"),
            (_P + "needed_replicas{$N}", "{{role}}: the forecast asks for"),
        ),
        _panel("Workers by state", "short", (_P + "replicas{$N}", "{{role}} {{state}}")),
        _panel("TTFT", "s", (_P + "observed_ttft_seconds{$N}", "mean of the interval")),
        _panel("ITL", "s", (_P + "observed_itl_seconds{$N}", "mean of the interval")),
        _panel(
            "Corrections", "none", (_P + "correction{$N}", "{{of}}"), about="Observed times over those of the profile."
        ),
        _panel(
            "Lengths",
            "short",
            (_P + "observed_isl_tokens{$N}", "prompt"),
            (_P + "observed_osl_tokens{$N}", "answer"),
        ),
        _share("Prompt tokens from a cache", (_P + "observed_hit_share{$N}", "observed")),
        _panel("GPU-hours", "short", (f"sum(increase({_P}gpu_hours_total{{$N}}[1h]))", "in an hour")),
        _panel("Decisions", "ops", (_rate(_P + "decisions_total", "action, code"), "{{action}}: {{code}}")),
        _panel("Orders", "ops", (_rate(_P + "applied_total", "outcome"), "{{outcome}}")),
        _panel(
            "On hold",
            "short",
            (f"max by (code) ({_P}on_hold{{$N}}) or vector(0)", "{{code}}"),
            ("max(kvmesh_planner_is_acting{$N})", "acts"),
        ),
    ),
)
DASHBOARDS = (OVERVIEW, MESH, FRONTEND, ROUTER, WORKERS, PLANNER)


def panel_queries() -> Iterator[tuple[str, str]]:
    """Yield the dashboard and panel, and the query, of each query of all panels, for every mesh and model."""
    for board in DASHBOARDS:
        for panel in board.panels:
            for query in panel.queries:
                yield f"{board.uid}, {panel.title}", _with_variables(query.expression, _ALL)


def dashboard_files() -> dict[str, str]:
    """Return the JSON of all dashboards, by file name."""
    return {f"{board.uid}.json": json.dumps(_board(board), indent=1) + "\n" for board in DASHBOARDS}


def _with_variables(expression: str, values: dict[str, str]) -> str:
    text = expression.replace("$M", _MODEL).replace("$N", _MESH)
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def _board(board: Dashboard) -> dict[str, Any]:
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["kvmesh"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["kvmesh"], "title": "kvmesh", "asDropdown": True, "keepTime": True}],
        "templating": {"list": _variables()},
        "panels": _placed(board.panels),
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    chosen = [("namespace", "kvmesh_build_info"), ("model", "kvmesh_worker_total_blocks")]
    return [source] + [
        {
            "name": name,
            "label": name,
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": {"query": f"label_values({metric}, {name})", "refId": name},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }
        for name, metric in chosen
    ]


def _placed(panels: Sequence[DashboardPanel]) -> list[dict[str, Any]]:
    """Return the panels as Grafana has them, in rows from left to right."""
    placed: list[dict[str, Any]] = []
    x = y = row_height = 0
    for number, panel in enumerate(panels, start=1):
        height = 4 if panel.kind == "stat" else 8
        if x + panel.width > WIDTH:
            x, y, row_height = 0, y + row_height, 0
        placed.append(_shown(panel, number, {"x": x, "y": y, "w": panel.width, "h": height}))
        x, row_height = x + panel.width, max(row_height, height)
    return placed


def _shown(panel: DashboardPanel, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    custom = {"fillOpacity": 8, "lineWidth": 1, "showPoints": "never"} if panel.kind == "timeseries" else {}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": None if panel.most is None else 0, "custom": custom}
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "expr": _with_variables(query.expression, {}),
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _options(kind: str) -> dict[str, Any]:
    if kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
