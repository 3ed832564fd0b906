"""Workers of a mesh share their weights: whoever is killed, answers stay the same, and a sleeping worker wakes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from kvmesh.frontend.keys.keyfile import KeyLine, hashed, written
from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.memory.client import read_holdings
from kvmesh.workers.memory.messages import Holdings
from tests.support.mesh import Mesh, running_mesh, until

pytestmark = [pytest.mark.e2e, pytest.mark.long]

KEY = "sk-operator"
WEIGHTS = "/memfd:kvmesh-weights"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(written(KeyLine(name="ops", sha256=hashed(KEY), admin=True)) + "\n")
    keys.chmod(0o600)
    flags = ("--prefill=0", "--decode=0", "--aggregated=2", "--memory-gib=1", "--dtype=bfloat16")
    with running_mesh(keys.parent / "run", *flags, f"--api-keys-file={keys}") as mesh:
        yield mesh


def holdings(mesh: Mesh) -> Holdings | None:
    try:
        return read_holdings(str(mesh.run_dir / "memory.sock"))
    except ConfigError:
        return None


def users(mesh: Mesh) -> list[int]:
    found = holdings(mesh)
    return [] if found is None else [image.users for image in found.images]


def places(mesh: Mesh) -> set[str]:
    """Return where the workers have their weights."""
    maps = [Path(f"/proc/{mesh.pid(name)}/maps").read_text().splitlines() for name in ("aggregated-0", "aggregated-1")]
    return {line.split("-")[0] for lines in maps for line in lines if WEIGHTS in line}


def answer(mesh: Mesh, name: str) -> str:
    body = {"model": "tiny", "prompt": "A lighthouse", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    sent = {"authorization": f"Bearer {KEY}", "x-kvmesh-worker": name}
    with mesh.http as http:
        reply = http.post("/v1/completions", json=body, headers=sent, timeout=60)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def operate(mesh: Mesh, *words: str) -> None:
    command = [sys.executable, "-m", "kvmesh", "workers", *words, f"--url={mesh.url}", f"--api-key={KEY}", "--json"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 0, said.stderr + said.stdout
    assert [json.loads(line) for line in said.stdout.splitlines()]


def test_two_workers_have_one_copy_at_one_place(mesh: Mesh) -> None:
    assert users(mesh) == [2]
    assert len(places(mesh)) == 1
    assert answer(mesh, "aggregated-0") == answer(mesh, "aggregated-1")


def test_a_worker_that_was_killed_maps_what_is_there(mesh: Mesh) -> None:
    before, expected = places(mesh), answer(mesh, "aggregated-0")
    for name in ("aggregated-0", "aggregated-1"):
        mesh.until_replaced(name, mesh.kill(name))
    until(lambda: users(mesh) == [2], what="both use the image")
    assert places(mesh) == before
    assert answer(mesh, "aggregated-0") == expected == answer(mesh, "aggregated-1")


def test_a_worker_sleeps_and_wakes_with_the_weights_where_they_were(mesh: Mesh) -> None:
    before, expected = places(mesh), answer(mesh, "aggregated-0")
    operate(mesh, "sleep", "aggregated-0")
    assert users(mesh) == [1]
    maps = Path(f"/proc/{mesh.pid('aggregated-0')}/maps").read_text()
    assert WEIGHTS not in maps
    operate(mesh, "wake", "aggregated-0")
    assert places(mesh) == before
    until(lambda: mesh.workers_seen() == 2, what="the worker that woke is used")
    assert answer(mesh, "aggregated-0") == expected


def test_a_service_that_was_killed_takes_nobody_along(mesh: Mesh) -> None:
    expected = answer(mesh, "aggregated-0")
    found = holdings(mesh)
    assert found is not None
    os.kill(found.pid, signal.SIGKILL)
    assert answer(mesh, "aggregated-0") == expected
    until(lambda: holdings(mesh) is not None, what="the service is started again")
    assert users(mesh) == []
    operate(mesh, "sleep", "aggregated-0")
    operate(mesh, "wake", "aggregated-0")
    assert users(mesh) == [1], "the image was written again"
    until(lambda: mesh.workers_seen() == 2, what="the worker that woke is used")
    assert psutil.pid_exists(mesh.pid("aggregated-1"))
    assert answer(mesh, "aggregated-0") == expected == answer(mesh, "aggregated-1")
