"""deploy/compose/mesh-tls.yml closes all of docker-compose.yml; `make test-containers` runs it."""

import shutil
import ssl
import subprocess
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvmesh.mesh.identity.names import MeshRole
from tests.support.certificates import TestCa

ROOT = Path(__file__).parents[2]
SERVICES: Mapping[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
CLOSED: Mapping[str, Any] = yaml.safe_load((ROOT / "deploy/compose/mesh-tls.yml").read_text())["services"]
OURS = [name for name, one in SERVICES.items() if one["image"].startswith("kvmesh/") and one["restart"] != "no"]
ROLES = {"frontend": "frontend", "router": "router", "planner": "planner"}


@pytest.mark.parametrize("service", OURS)
def test_a_service_has_the_certificate_of_its_role_and_no_other(service: str) -> None:
    role = ROLES.get(service, "worker")
    settings = CLOSED[service]
    assert settings["environment"][f"KVMESH_{role.upper()}_MESH_TLS"] == f"/run/kvmesh/tls/{role}"
    assert settings["volumes"] == [f"tls-{role}:/run/kvmesh/tls/{role}:ro"]
    assert settings["depends_on"] == {"certificates": {"condition": "service_completed_successfully"}}


@pytest.mark.parametrize("services", [SERVICES, CLOSED])
def test_prometheus_stores_the_traces_that_histograms_name(services: Mapping[str, Any]) -> None:
    assert "--enable-feature=exemplar-storage" in services["prometheus"]["command"]


def test_who_makes_certificates_has_no_network_and_no_rights() -> None:
    maker = CLOSED["certificates"]
    assert maker["network_mode"] == "none"
    assert maker["cap_drop"] == ["ALL"]
    assert not any("mesh-ca" in volume for one in CLOSED.values() if one is not maker for volume in one["volumes"])


def test_every_folder_of_a_volume_is_in_the_image_with_its_owner() -> None:
    line = next(
        line for line in (ROOT / "deploy/Dockerfile").read_text().splitlines() if line.startswith(" && for folder")
    )
    for volume in CLOSED["certificates"]["volumes"]:
        assert volume.partition(":/run/kvmesh")[2] in line.replace(";", "").split()


def test_prometheus_scrapes_what_it_scrapes_without_tls() -> None:
    plain, closed = (
        yaml.safe_load((ROOT / "deploy/prometheus" / name).read_text()) for name in ("prometheus.yml", "mesh-tls.yml")
    )
    moved = {8000: 8001}  # the frontend's port for members
    for job in plain["scrape_configs"]:
        for found in job.get("dns_sd_configs", []):
            found["port"] = moved.get(found["port"], found["port"])
    for job in closed["scrape_configs"]:
        assert job.pop("scheme") == "https"
        assert job.pop("tls_config")["key_file"] == "/run/kvmesh/tls/key.pem"
    assert closed == plain


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed: apt-get install openssl")
def test_a_container_is_asked_over_tls_without_a_certificate(tmp_path: Path) -> None:
    folder = TestCa(tmp_path / "ca").issue(MeshRole.WORKER)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = [
            subprocess.run([ROOT / "deploy/healthy", "--tls", str(server.server_port), path], check=False).returncode
            for path in ("/health", "/other")
        ]
        server.shutdown()
    assert asked[0] == 0
    assert asked[1] != 0
