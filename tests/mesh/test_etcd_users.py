"""An etcd that asks for passwords, and the user of a mesh: against a real etcd-server."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.mesh.discovery import Deleted, Put
from kvmesh.mesh.discovery.etcd.command import main
from kvmesh.mesh.discovery.etcd.discovery import EtcdDiscovery, read_settings
from kvmesh.mesh.discovery.etcd.users import HEALTH, guard
from kvmesh.protocol.errors import ConfigError, UnreachableError
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


# --- roles ---------------------------------------------------------------------------------------------------------


def place_of(etcd: EtcdProcess, folder: Path, user: str) -> str:
    return f"{etcd.endpoint}/site?user={user}&password-file={folder / 'mesh'}"


def make_user(etcd: EtcdProcess, folder: Path, user: str, role: str, *more: str) -> int:
    url = f"etcd:{place_of(etcd, folder, user)}"
    return main(["--discovery", url, "--root-password-file", str(folder / "root"), "--role", role, *more])


async def may_write(rest: str, key: str) -> bool:
    store = EtcdDiscovery(rest)
    try:
        await store.put(key, b"card")
    except ConfigError:
        return False
    else:
        return True
    finally:
        await store.close()


KEYS = ("workers/decode-0-ab12", "workers/decoy-0-ab12", "workers/prefill-0-ab12", "routers/r", "frontends/f", "down/x")


@pytest.mark.parametrize(
    ("role", "more", "writes"),
    [
        ("worker", (), {"workers/decode-0-ab12", "workers/decoy-0-ab12", "workers/prefill-0-ab12"}),
        ("worker", ("--name", "decode"), {"workers/decode-0-ab12"}),
        ("router", (), {"routers/r"}),
        ("frontend", (), {"routers/r", "frontends/f"}),
        ("reader", (), set()),
        ("all", (), set(KEYS)),
    ],
)
async def test_a_user_writes_the_cards_of_its_role_alone(
    etcd: EtcdProcess, tmp_path: Path, role: str, more: tuple[str, ...], writes: set[str]
) -> None:
    make_user(etcd, tmp_path, "one", role, *more)
    rest = place_of(etcd, tmp_path, "one")
    assert {key for key in KEYS if await may_write(rest, key)} == writes


async def test_every_role_sees_the_cards_of_the_mesh(etcd: EtcdProcess, tmp_path: Path) -> None:
    make_user(etcd, tmp_path, "writer", "worker")
    make_user(etcd, tmp_path, "looker", "reader")
    writer, looker = (EtcdDiscovery(place_of(etcd, tmp_path, user)) for user in ("writer", "looker"))
    await writer.put("workers/a", b"card")
    assert await anext(looker.watch("workers/")) == Put("workers/a", b"card")
    await writer.close()
    await looker.close()


async def test_a_workers_lease_is_renewed_and_withdrawn(etcd: EtcdProcess, tmp_path: Path) -> None:
    make_user(etcd, tmp_path, "one", "worker", "--name", "decode")
    make_user(etcd, tmp_path, "looker", "reader")
    worker = EtcdDiscovery(f"{place_of(etcd, tmp_path, 'one')}&lease-s=2")
    looker = EtcdDiscovery(place_of(etcd, tmp_path, "looker"))
    await worker.put("workers/decode-1", b"card")
    watch = looker.watch("workers/")
    assert await anext(watch) == Put("workers/decode-1", b"card")
    await asyncio.sleep(3.0)  # longer than the lease
    registration = await worker.put("workers/decode-2", b"card")
    assert await anext(watch) == Put("workers/decode-2", b"card")
    await registration.withdraw()
    assert await anext(watch) == Deleted("workers/decode-2", has_lapsed=False)
    await worker.close()
    await looker.close()


async def test_a_user_that_gets_another_role_loses_the_rights_of_the_first(etcd: EtcdProcess, tmp_path: Path) -> None:
    make_user(etcd, tmp_path, "one", "all")
    make_user(etcd, tmp_path, "one", "router")
    rest = place_of(etcd, tmp_path, "one")
    assert {key for key in KEYS if await may_write(rest, key)} == {"routers/r"}


def test_a_second_run_with_a_role_changes_nothing(etcd: EtcdProcess, tmp_path: Path) -> None:
    make_user(etcd, tmp_path, "one", "frontend")
    before = etcd.ctl("--user", "root:root-secret", "role", "get", "one", "-w", "json")
    make_user(etcd, tmp_path, "one", "frontend")
    assert etcd.ctl("--user", "root:root-secret", "role", "get", "one", "-w", "json") == before


def test_only_workers_are_limited_by_name(tmp_path: Path) -> None:
    (tmp_path / "mesh").write_text("secret")
    url = f"etcd:127.0.0.1:9/site?user=one&password-file={tmp_path / 'mesh'}"
    with pytest.raises(ConfigError, match="only a worker's cards"):
        main(["--discovery", url, "--root-password-file", str(tmp_path / "mesh"), "--role", "router", "--name", "x"])
