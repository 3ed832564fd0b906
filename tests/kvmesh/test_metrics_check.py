"""Metrics, dashboards and alerts against a running mesh and a real Prometheus: `make test-metrics`."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from kvmesh.lab.observability.check import (
    alert_names,
    duration_ms,
    exported,
    scaled_expression,
    scaled_rules,
    undeclared_names,
)
from kvmesh.lab.observability.dashboards import DASHBOARDS, dashboard_files, panel_queries
from kvmesh.lab.observability.named_faults import FAULTS
from kvmesh.lab.observability.prometheus import prometheus_program
from kvmesh.lab.observability.write import ROOT, RULES

RULES_TEXT = (ROOT / RULES).read_text(encoding="utf-8")
LIVE_S = 560.0


@pytest.mark.skipif(not os.environ.get("KVMESH_TEST_METRICS"), reason="takes minutes: make test-metrics")
@pytest.mark.skipif(prometheus_program() is None, reason="there is no Prometheus server: apt-get install prometheus")
def test_a_live_mesh_shows_every_metric_panel_and_alert() -> None:
    command = [sys.executable, "-m", "kvmesh", "metrics-check", "--json"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIVE_S, check=False)
    report = json.loads(result.stdout.splitlines()[-1])
    print(report)
    assert report["problems"] == []
    assert result.returncode == 0
    assert (report["undeclared"], report["panels_empty"], report["alerts_stuck"]) == (0, 0, 0)
    assert report["alerts_fired"] == report["alerts"] == len(alert_names(RULES_TEXT))


def test_every_alert_has_one_fault_that_the_check_makes_and_advice() -> None:
    told = [alert for fault in FAULTS for alert in fault.alerts]
    assert sorted(told) == sorted(alert_names(RULES_TEXT))
    page = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    assert [name for name in told if f"### {name}\n" not in page] == []


def test_dashboards_have_unique_names_and_panels_fit_the_page() -> None:
    assert len({board.uid for board in DASHBOARDS}) == len(DASHBOARDS) == 6
    for text in dashboard_files().values():
        board = json.loads(text)
        places = [panel["gridPos"] for panel in board["panels"]]
        assert all(place["x"] + place["w"] <= 24 for place in places)
        cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
        assert len(cells) == len(set(cells)), board["title"]
        assert len({panel["title"] for panel in board["panels"]}) == len(board["panels"])


def test_panels_ask_for_metrics_that_are_declared_or_recorded() -> None:
    recorded = {rule.get("record") for group in yaml.safe_load(RULES_TEXT)["groups"] for rule in group["rules"]}
    for panel, query in panel_queries():
        assert "$" not in query.replace("$__rate_interval", ""), panel
        names = _names(query)
        assert undeclared_names(names - recorded) == [], panel
        assert {name for name in names if ":" in name} <= recorded, panel


def _names(query: str) -> set[str]:
    return set(re.findall(r"\b(?:kvmesh|gen_ai)[a-z0-9_:]+", query))


def test_times_of_rules_are_made_shorter() -> None:
    assert duration_ms("1h30m") == 5_400_000
    assert scaled_expression("rate(a[5m]) > 7 * 24 * 3600", 30) == "rate(a[10000ms]) > 7 * 24 * 3600"
    assert scaled_expression("avg_over_time((a > bool 0)[5m:])", 30) == "avg_over_time((a > bool 0)[10000ms:500ms])"
    assert scaled_expression("delta(a[5m])", 600) == "delta(a[2000ms])", "a window has four scrapes"
    text = "groups:\n- name: g\n  rules:\n  - {alert: A, expr: 'a > 1', for: 2m}\n  - {record: b, expr: 'c'}\n"
    [group] = yaml.safe_load(scaled_rules(text, 30))["groups"]
    assert group["rules"] == [{"alert": "A", "expr": "a > 1", "for": "4000ms"}, {"record": "b", "expr": "c"}]
    assert alert_names(text) == ["A"]


PAGE = """# TYPE kvmesh_frontend_inflight gauge
kvmesh_frontend_inflight{component="frontend",namespace="n"} 1
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 1
# TYPE kvmesh_nonsense gauge
kvmesh_nonsense 1
# TYPE kvmesh_frontend_requests counter
kvmesh_frontend_requests_total{endpoint="chat",user="me"} 1
"""


def test_what_is_not_declared_is_found_on_a_page() -> None:
    found, wrong = exported({"frontend": PAGE})
    assert found == {"kvmesh_frontend_inflight", "kvmesh_frontend_requests_total"}
    assert wrong == ["kvmesh_frontend_requests_total: label user", "kvmesh_nonsense"]
