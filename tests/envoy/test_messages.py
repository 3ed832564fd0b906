"""The recorded messages of tests/frontend/picker are those that Envoy's classes write today."""

import subprocess
from pathlib import Path

import pytest

from tests.envoy.proxy import ROOT

RECORDED = ROOT / "tests" / "frontend" / "picker" / "ext_proc.json"
RECORDER = ROOT / "tests" / "envoy" / "record_messages.py"
PYTHON = ROOT / ".venv-envoy" / "bin" / "python"


def test_envoys_classes_write_the_recorded_messages(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("KVMESH_ENVOY names an Envoy without its Python classes")
    subprocess.run([PYTHON, RECORDER, tmp_path / "now.json"], check=True, timeout=60)
    assert (tmp_path / "now.json").read_text() == RECORDED.read_text()
