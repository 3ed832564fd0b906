"""The Slurm script on three hosts: what srun would start on a node is started on a host of the lab."""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.lab.hosts.lab import Lab, LabError, LabHost, lab, why_not
from tests.support.fake_slurm import Node, write_fake_slurm
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "kvmesh.sbatch"
NODES = ("front", "prefill", "decode")
ENTER = 'mount --make-rprivate /; mount -t tmpfs tmpfs /dev/shm; hostname "$0"; exec "$@"'

pytestmark = pytest.mark.skipif(not os.environ.get("KVMESH_TEST_HOSTS"), reason="hosts: run `make test-hosts`")


def node_of(host: LabHost) -> Node:
    unshare = ("unshare", "-m", "-p", "-i", "-u", "-f", "--kill-child", "--mount-proc", "bash", "-c", ENTER, host.name)
    return Node(host.address, ("ip", "netns", "exec", host.namespace, *unshare))


def variables(made: Lab) -> dict[str, str]:
    """Return the environment of the job: Slurm's variables, and the settings at the top of the script."""
    folder = made.folder / "bin"
    slurm = write_fake_slurm(folder, {name: node_of(made.hosts[name]) for name in NODES})
    slurm["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    settings = {"MODEL_PATH": str(CHECKPOINT_DIR), "MODEL": "tiny", "ENGINE": "torch", "PYTHON": sys.executable}
    return slurm | settings | {"FOLDER": str(made.folder / "job"), "TMPDIR": str(made.folder), "DRAIN_S": "3"}


def test_the_script_serves_over_hosts_and_leaves_nothing_behind(tmp_path: Path) -> None:
    if problem := why_not() or ("" if shutil.which("etcd") else "missing: etcd; apt-get install etcd-server"):
        pytest.fail(problem)
    with lab(tmp_path) as made:
        front = made.hosts["front"]
        job = front.start("sbatch", "env", *(f"{k}={v}" for k, v in variables(made).items()), "bash", str(SCRIPT))
        url = f"http://{front.address}:8000"
        job.until_logged(f"ready: curl {url}/v1/models", PATIENCE_S)
        until_both_roles(front, url)
        before = made.hosts["prefill"].sent_bytes()
        body = {
            "model": "tiny",
            "prompt": list(range(5, 405)),
            "max_tokens": 8,
            "temperature": 0,
            "kvmesh": {"trace": True},
        }
        ask = ("curl", "-s", "-m", "30", f"{url}/v1/completions", "-H", "content-type: application/json")
        answer = json.loads(front.run(*ask, "-d", json.dumps(body)))
        assert answer["choices"][0]["text"]
        assert re.fullmatch(r"prefill-prefill-0", answer["kvmesh"]["prefill_worker"])
        assert made.hosts["prefill"].sent_bytes() - before > answer["kvmesh"]["kv_bytes_pulled"] > 100_000
        job.stop()
        assert job.process.returncode == 0, job.log()
        assert "stopping: requests in flight have 3 s" in job.log()
        assert not (tmp_path / "job" / "url").exists() and not list(tmp_path.glob("kvmesh-etcd-*"))
        for name in ("frontend", "prefill-prefill-0", "decode-decode-0"):
            assert "stopped" in (tmp_path / "job" / f"{name}.log").read_text().splitlines()[-1]


def until_both_roles(front: LabHost, url: str) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    found = {}
    while found != {"aggregated": 0, "prefill": 1, "decode": 1}:
        assert time.monotonic() < ends_s, found
        time.sleep(0.1)
        try:
            found = json.loads(front.run("curl", "-s", f"{url}/health"))["workers"].get("tiny", {})
        except LabError:
            continue
