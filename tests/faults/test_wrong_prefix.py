"""A frontend whose etcd prefix is not that of the workers says so, in the log and in /health."""

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.etcd_server import WHY_NONE, EtcdProcess
from tests.support.mesh import until

pytestmark = pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)


@pytest.mark.long
def test_a_wrong_prefix_is_named_once_in_the_log_and_in_health(tmp_path: Path) -> None:
    with ExitStack() as stack:
        etcd = EtcdProcess(tmp_path)
        stack.callback(etcd.stop)
        etcd.ctl("put", "/site/workers/a", "a card")
        log = tmp_path / "frontend.log"
        command = [sys.executable, "-m", "kvmesh.frontend", "--port", "0", "--discovery", f"etcd:{etcd.endpoint}/sight"]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        stack.callback(process.wait)
        stack.callback(process.kill)
        until(lambda: re.search(r"url=(http://\S+)", log.read_text()), what="the frontend")
        url = re.findall(r"\burl=(http://\S+)", log.read_text())[0]
        place = f"etcd:{etcd.endpoint}/sight"
        until(lambda: "no worker can be used" in log.read_text(), what="the line")
        report = httpx.get(f"{url}/health")
        assert report.status_code == 503
        assert report.json()["discovery"] == {"place": place, "status": "reached", "workers_found": 0, "ignored": []}
        refused = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "Once"})
        assert (refused.status_code, "GET /health says why" in refused.text) == (503, True)
        line = f"no worker can be used: searched in {place} (reached), found 0; give workers the same --discovery"
        assert log.read_text().count(line) == log.read_text().count("no worker can be used") == 1
        etcd.ctl("put", "/sight/workers/a", "a card")
        until(lambda: httpx.get(f"{url}/health").json()["discovery"]["workers_found"] == 1)
        until(lambda: "found 1; workers/a: its card cannot be read" in log.read_text(), what="the second line")
