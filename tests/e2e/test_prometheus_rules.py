"""The configuration and the rules of Prometheus: they are valid, and speak of metrics and services that exist."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvmesh.frontend.errors import OUTCOMES
from kvmesh.lab.observability.check import undeclared_names

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "prometheus"
RULES = (FOLDER / "rules.yml").read_text()
CONFIG: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool: apt-get install prometheus")
@pytest.mark.parametrize(("what", "file"), [("config", "prometheus.yml"), ("rules", "rules.yml")])
def test_promtool_finds_nothing_wrong(what: str, file: str) -> None:
    result = subprocess.run(["promtool", "check", what, FOLDER / file], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_rules_speak_of_metrics_that_exist() -> None:
    named = set(re.findall(r"\bkvmesh_\w+", RULES))
    assert named
    assert undeclared_names(named) == []


def test_rules_speak_of_outcomes_that_exist() -> None:
    [told] = re.findall(r'requests_total\{outcome=~"([\w|]+)"\}', RULES)
    assert set(told.split("|")) <= OUTCOMES


def test_scraped_ports_are_those_of_the_services() -> None:
    for job in CONFIG["scrape_configs"]:
        for place in job["dns_sd_configs"]:
            for name in place["names"]:
                command = " ".join(map(str, SERVICES[name]["command"]))
                assert re.search(rf"--(?:port|http-port|metrics-port) {place['port']}\b", command), name


def test_every_service_of_ours_that_stays_is_scraped() -> None:
    scraped = {n for job in CONFIG["scrape_configs"] for place in job["dns_sd_configs"] for n in place["names"]}
    ours = {n for n, s in SERVICES.items() if s["image"].startswith("kvmesh/") and s["restart"] != "no"}
    assert scraped == ours
