"""Test that a wrong setting in a cluster costs one clear error: what was found, what was expected, what to do.

A wrong prefix is in tests/faults/test_wrong_prefix.py, a release that is too far away in tests/compat.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.support.etcd_server import WHY_NONE, EtcdProcess
from tests.support.mesh import until
from tests.support.services import NEW, Services, quiet_port
from tests.support.streams import Stream, check_mock_answer

needs_etcd = pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.long
def test_without_etcd_a_service_ends_and_names_the_endpoint(tmp_path: Path, stack: ExitStack) -> None:
    endpoint = f"127.0.0.1:{quiet_port()}"
    mesh = Services(tmp_path, f"etcd:{endpoint}/site", stack)
    for name in [mesh.start("aggregated", NEW), mesh.start("frontend", NEW), mesh.start("router", NEW)]:
        line = mesh.error_of(name)
        assert f"no etcd answers at {endpoint}" in line and line.endswith("start etcd, or set --discovery")


@needs_etcd
@pytest.mark.parametrize("rights", ["read", pytest.param("none", marks=pytest.mark.long)])
def test_without_rights_a_service_ends_and_says_which_it_needs(tmp_path: Path, stack: ExitStack, rights: str) -> None:
    etcd = EtcdProcess(tmp_path)
    stack.callback(etcd.stop)
    etcd.ctl("user", "add", "root:r")
    etcd.ctl("user", "grant-role", "root", "root")
    etcd.ctl("user", "add", "mesh:secret")
    etcd.ctl("role", "add", "mesh")
    if rights == "read":
        etcd.ctl("role", "grant-permission", "mesh", "--prefix=true", "read", "/site/")
    etcd.ctl("user", "grant-role", "mesh", "mesh")
    etcd.ctl("auth", "enable")
    (tmp_path / "password").write_text("secret\n")
    mesh = Services(tmp_path, f"etcd:{etcd.endpoint}/site?user=mesh&password-file={tmp_path / 'password'}", stack)
    for name in [mesh.start("aggregated", NEW), mesh.start("frontend", NEW)]:
        line = mesh.error_of(name)
        assert f"etcd at {etcd.endpoint} refuses: " in line and "permission denied" in line
        assert "give the user read and write access to /site/" in line and "secret" not in line


@pytest.mark.long
def test_two_models_under_one_name_are_told_apart_and_the_first_serves(tmp_path: Path, stack: ExitStack) -> None:
    other = tmp_path / "other"
    shutil.copytree(CHECKPOINT_DIR, other)
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    mesh = Services(tmp_path, f"file:{tmp_path / 'discovery'}", stack)
    frontend = mesh.start("frontend", NEW)
    mesh.until_ready(frontend, mesh.start("aggregated", NEW, name="first"))
    mesh.until_joined(frontend, 1)
    mesh.until_ready(
        mesh.start("aggregated", NEW, "--block-size", "32", name="blocks"),
        mesh.start("aggregated", NEW, name="template", model_path=other),
    )
    until(lambda: len(mesh.health(frontend)["discovery"]["ignored"]) == 2, what="both in /health")
    reasons = {one["key"]: one["reason"] for one in mesh.health(frontend)["discovery"]["ignored"]}
    blocks, template = sorted(reasons)
    assert blocks.startswith("workers/blocks-") and "its block size is 32, that of the other workers" in reasons[blocks]
    assert template.startswith("workers/template-") and "its tokenizer or chat template is not" in reasons[template]
    assert mesh.log(frontend).count(" waits: its block size") == 2
    for first in range(1, 7):
        check_mock_answer(Stream(mesh.url(frontend), [first * 100 + i for i in range(30)], 4).join())


def test_a_list_that_is_missing_ends_who_reads_it(tmp_path: Path, stack: ExitStack) -> None:
    path = tmp_path / "mesh.txt"
    mesh = Services(tmp_path, f"static:{path}", stack)
    line = mesh.error_of(mesh.start("frontend", NEW))
    assert f"the list of addresses {path} cannot be read: No such file or directory; write host:port" in line
    path.write_text("10.0.0.1:7000\n10.0.0.2\n")
    assert f"{path}, line 2: '10.0.0.2' is no address" in mesh.error_of(mesh.start("router", NEW))
