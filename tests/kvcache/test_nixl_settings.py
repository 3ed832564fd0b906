"""Settings of UCX that are set, but empty, do not keep NIXL from starting."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from kvmesh.kvcache.transfer.nixl import ignored_settings, why_unavailable


def test_only_empty_settings_of_ucx_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("UCX_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("UCX_TLS", "")
    monkeypatch.setenv("UCX_NET_DEVICES", " ")
    monkeypatch.setenv("UCX_LOG_LEVEL", "warn")
    monkeypatch.setenv("NOT_UCX", "")
    assert ignored_settings() == ["UCX_NET_DEVICES", "UCX_TLS"]


@pytest.mark.skipif(bool(why_unavailable()), reason="NIXL does not load here")
def test_nixl_starts_with_an_empty_list_of_transports() -> None:
    """A compose file makes an empty variable of one that is not set: `UCX_TLS: ${UCX_TLS:-}`."""
    probe = subprocess.run(
        [sys.executable, "-m", "kvmesh.commands.nixl_probe"],
        env=os.environ | {"UCX_TLS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(probe.stdout)
    assert (answer["problem"], "UCX" in answer["usable"]) == ("", True)
    assert "UCX_TLS is set, but empty" in probe.stderr


@pytest.mark.skipif(bool(why_unavailable()), reason="NIXL does not load here")
@pytest.mark.skipif(not metadata.version("torch").endswith("+cpu"), reason="NIXL chooses its build by torch's CUDA")
def test_nixl_does_not_import_torch_on_a_cpu() -> None:
    script = (
        "import sys; from kvmesh.kvcache.transfer import nixl; print(nixl.why_unavailable(), 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"], found.stderr
