"""A worker that is started again on the port of its predecessor replaces it long before the lease ends."""

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.etcd_server import WHY_NONE, EtcdProcess
from tests.support.mesh import until
from tests.support.services import NEW, Services, quiet_port
from tests.support.streams import Stream, check_mock_answer

LEASE_S = 120


@pytest.mark.long
@pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)
def test_a_worker_of_the_same_address_replaces_one_that_was_killed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        etcd = EtcdProcess(tmp_path)
        stack.callback(etcd.stop)
        mesh = Services(tmp_path, f"etcd:{etcd.endpoint}/site?lease-s={LEASE_S}", stack)
        port = str(quiet_port())
        frontend = mesh.start("frontend", NEW)
        mesh.until_ready(frontend, mesh.start("aggregated", NEW, "--port", port))
        mesh.until_joined(frontend, 1)
        mesh.kill("aggregated-new")
        killed_s = time.monotonic()
        mesh.until_ready(mesh.start("aggregated", NEW, "--port", port))
        until(lambda: "has replaced" in mesh.log(frontend), what="the replacement")
        assert time.monotonic() - killed_s < LEASE_S, "the card of the dead worker still stands"
        assert len(etcd.ctl("get", "/site/workers/", "--prefix", "--keys-only").split()) == 2
        mesh.until_joined(frontend, 1)
        for first in range(1, 5):
            check_mock_answer(Stream(mesh.url(frontend), [first * 100 + i for i in range(30)], 4).join())
