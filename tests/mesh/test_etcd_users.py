"""An etcd that asks for passwords, and the user of a mesh: against a real etcd-server."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.etcd_user import main
from mesh.discovery import Put
from mesh.discovery.etcd import EtcdDiscovery, read_settings
from mesh.discovery.etcd_users import HEALTH, guard
from protocol.errors import ConfigError, UnreachableError
from tests.support.etcd_server import WHY_NONE, EtcdProcess

pytestmark = pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    for name, password in (("mesh", "mesh-secret"), ("root", "root-secret"), ("wrong", "no-secret")):
        (tmp_path / name).write_text(f"{password}\n")
    process = EtcdProcess(tmp_path)
    yield process
    process.stop()


def place(etcd: EtcdProcess, folder: Path, prefix: str = "site", password: str = "mesh") -> str:
    return f"{etcd.endpoint}/{prefix}?user=mesh&password-file={folder / password}"


def set_up(etcd: EtcdProcess, folder: Path, root: str = "root") -> int:
    return main(["--discovery", f"etcd:{place(etcd, folder)}", "--root-password-file", str(folder / root)])


async def first_change(rest: str) -> object:
    """Put a key as a service does, and return the first thing that a watch of it shows."""
    store = EtcdDiscovery(rest)
    try:
        await store.put("workers/a", b"card")
        return await anext(store.watch("workers/"))
    finally:
        await store.close()


async def test_the_user_of_the_mesh_uses_its_prefix_and_no_other(etcd: EtcdProcess, tmp_path: Path) -> None:
    assert set_up(etcd, tmp_path) == 0
    assert await first_change(place(etcd, tmp_path)) == Put("workers/a", b"card")
    for refused in (place(etcd, tmp_path, prefix="other"), place(etcd, tmp_path, password="wrong"), etcd.endpoint):
        with pytest.raises(ConfigError, match="refuses"):
            await first_change(refused)


def test_a_second_run_changes_nothing(etcd: EtcdProcess, tmp_path: Path) -> None:
    set_up(etcd, tmp_path)
    before = etcd.ctl("--user", "root:root-secret", "user", "get", "mesh", "-w", "json")
    set_up(etcd, tmp_path)
    assert etcd.ctl("--user", "root:root-secret", "user", "get", "mesh", "-w", "json") == before


async def test_a_new_password_file_changes_the_password(etcd: EtcdProcess, tmp_path: Path) -> None:
    set_up(etcd, tmp_path)
    (tmp_path / "mesh").write_text("another-secret")
    set_up(etcd, tmp_path)
    assert await first_change(place(etcd, tmp_path)) == Put("workers/a", b"card")


def test_a_health_check_can_log_in_and_do_nothing_else(etcd: EtcdProcess, tmp_path: Path) -> None:
    set_up(etcd, tmp_path)
    etcd.ctl("--user", f"{HEALTH}:{HEALTH}", "endpoint", "health")
    with pytest.raises(subprocess.CalledProcessError):
        etcd.ctl("--user", f"{HEALTH}:{HEALTH}", "get", "/site/", "--prefix")
    with pytest.raises(subprocess.CalledProcessError):
        etcd.ctl("endpoint", "health")


def test_another_root_password_is_refused(etcd: EtcdProcess, tmp_path: Path) -> None:
    set_up(etcd, tmp_path)
    with pytest.raises(ConfigError, match="does not take the password of root"):
        set_up(etcd, tmp_path, root="wrong")


def test_an_etcd_that_does_not_answer_is_named(tmp_path: Path) -> None:
    (tmp_path / "mesh").write_text("secret")
    settings = read_settings(f"127.0.0.1:9/site?user=mesh&password-file={tmp_path / 'mesh'}")
    with pytest.raises(UnreachableError, match=r"etcd:127\.0\.0\.1:9/site does not answer"):
        guard(settings, "root-secret", wait_s=0.0)


@pytest.mark.parametrize("url", ["file:/tmp/x", "etcd:127.0.0.1:9/site"])
def test_discovery_without_a_user_is_refused(tmp_path: Path, url: str) -> None:
    (tmp_path / "root").write_text("secret")
    with pytest.raises(ConfigError, match="names no user of an etcd"):
        main(["--discovery", url, "--root-password-file", str(tmp_path / "root")])
