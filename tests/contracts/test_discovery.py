"""Test the contract of every discovery backend, and further promises of the file backend."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvmesh.mesh.discovery import BACKENDS, Change, Deleted, Discovery, Put, open_discovery
from kvmesh.mesh.discovery.file import FileDiscovery, _CardFiles
from kvmesh.mesh.discovery.memory import MemoryDiscovery
from kvmesh.protocol.errors import ConfigError
from tests.support.etcd_server import WHY_NONE, EtcdProcess
from tests.support.fake_cluster import FakeCluster
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port


@pytest_asyncio.fixture(params=["memory", *BACKENDS])
async def discovery(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Discovery]:
    """A backend at an empty place. One that needs more than a path gets its case here."""
    cluster: FakeCluster | None = None
    match request.param:
        case "memory":
            store: Discovery = MemoryDiscovery()
        case "etcd":
            if WHY_NONE:
                pytest.skip(WHY_NONE)
            etcd = EtcdProcess(tmp_path)
            request.addfinalizer(etcd.stop)
            store = open_discovery(f"etcd:{etcd.endpoint}/run")
        case "kubernetes":
            cluster = FakeCluster()
            await cluster.start()
            monkeypatch.setenv("KVMESH_POD_NAME", "pod-0")
            monkeypatch.setenv("KVMESH_POD_UID", cluster.put_pod("ns", "pod-0", "run"))
            token = tmp_path / "token"
            token.write_text(cluster.token)
            store = open_discovery(f"kubernetes:ns/run?api={cluster.url}&token-file={token}")
        case "static":  # a process that asks itself over the wire
            address = f"127.0.0.1:{free_port()}"
            (tmp_path / "mesh.txt").write_text(f"{address}\n")
            store = open_discovery(f"static:{tmp_path / 'mesh.txt'}?listen={address}")
        case scheme:
            store = open_discovery(f"{scheme}:{tmp_path / 'run'}")
    yield store
    await store.close()
    if cluster is not None:
        await cluster.stop()


async def take(changes: AsyncIterator[Change], count: int) -> list[Change]:
    return [await asyncio.wait_for(anext(changes), PATIENCE_S) for _ in range(count)]


async def test_a_watcher_sees_present_keys_and_all_changes(discovery: Discovery) -> None:
    await discovery.put("workers/a", b"1")
    changes = discovery.watch("workers/")
    assert await take(changes, 1) == [Put("workers/a", b"1")]
    registration = await discovery.put("workers/b", b"2")
    await discovery.put("routers/x", b"3")
    assert await take(changes, 1) == [Put("workers/b", b"2")]
    await registration.withdraw()
    assert await take(changes, 1) == [Deleted("workers/b")]


async def test_a_new_value_is_news(discovery: Discovery) -> None:
    changes = discovery.watch("")
    await discovery.put("workers/a", b"1")
    assert await take(changes, 1) == [Put("workers/a", b"1")]
    await discovery.put("workers/a", b"2")
    assert await take(changes, 1) == [Put("workers/a", b"2")]


async def test_odd_keys_are_kept_apart(discovery: Discovery) -> None:
    keys = ["workers/..", "workers/a b", "workers/%2F", "workers/ü/x"]
    for key in keys:
        await discovery.put(key, key.encode())
    seen = {c.key: c.value for c in await take(discovery.watch("workers/"), 4) if isinstance(c, Put)}
    assert seen == {key: key.encode() for key in keys}


async def test_a_backend_says_where_it_searches(discovery: Discovery) -> None:
    await discovery.put("workers/a", b"1")
    await take(discovery.watch("workers/"), 1)
    async with asyncio.timeout(PATIENCE_S):
        while discovery.where().status() != "reached":
            await asyncio.sleep(0.01)
    assert discovery.where().name


async def test_a_directory_that_cannot_be_read_is_away_until_it_returns(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    store = FileDiscovery(os.path.relpath(folder))
    assert (store.where().name, store.where().status()) == (
        f"file:{Path.cwd()}/{os.path.relpath(folder)}",
        "not reached yet",
    )
    changes = store.watch("")
    await store.put("workers/a", b"1")
    await take(changes, 1)
    shutil.rmtree(folder)
    folder.write_text("a file is in the way")

    async def until(status: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not store.where().status().startswith(status):
                await asyncio.sleep(0.01)

    await until("away since 20")
    folder.unlink()
    await until("reached")
    await store.close()


async def test_a_second_withdrawal_does_nothing(discovery: Discovery) -> None:
    registration = await discovery.put("workers/a", b"1")
    await registration.withdraw()
    await registration.withdraw()


@pytest.mark.parametrize("url", ["", "file", "file:", "consul://localhost", "/tmp/run"])
def test_an_unknown_backend_is_refused_with_those_that_exist(url: str) -> None:
    with pytest.raises(ConfigError, match="use file:<directory>"):
        open_discovery(url)


async def test_closing_withdraws_and_ends_watches(tmp_path: Path) -> None:
    store, other = FileDiscovery(str(tmp_path)), FileDiscovery(str(tmp_path))
    await store.put("workers/a", b"1")
    changes = other.watch("workers/")
    await take(changes, 1)
    await store.close()
    assert await take(changes, 1) == [Deleted("workers/a")]
    await other.close()
    with pytest.raises(StopAsyncIteration):
        await anext(changes)
    assert list(tmp_path.iterdir()) == []


async def test_a_process_that_only_registers_reads_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 workers on one host would each read 1,000 files a second for nobody."""
    store, scandir = FileDiscovery(str(tmp_path)), os.scandir
    reads: list[object] = []
    monkeypatch.setattr(os, "scandir", lambda path: reads.append(path) or scandir(path))
    await store.put("workers/a", b"1")
    await asyncio.sleep(0.5)
    assert reads == []
    assert await take(store.watch("workers/"), 1) == [Put("workers/a", b"1")]
    assert reads
    await store.close()


async def test_a_file_is_read_once_however_often_it_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading what is renewed took most of an idle frontend's time with 1,000 workers."""
    owner, store = FileDiscovery(str(tmp_path), lease_s=0.3), FileDiscovery(str(tmp_path), lease_s=0.3)
    await owner.put("workers/a", b"1")
    changes, read = store.watch("workers/"), Path.read_bytes
    assert await take(changes, 1) == [Put("workers/a", b"1")]
    await asyncio.sleep(0.5)  # the directory rests
    reads: list[Path] = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path) or read(path))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(pending := asyncio.ensure_future(anext(changes))), 1.5)
    assert reads == []
    for value in (b"2", b"3", b"4", b"5"):  # a file may get the inode that was freed before
        await owner.put("workers/a", value)
    last = await pending
    while last != Put("workers/a", b"5"):
        [last] = await take(changes, 1)
    await owner.close()
    await store.close()


OWNER = """
import asyncio, sys
from kvmesh.mesh.discovery.file import FileDiscovery
from kvmesh.protocol.errors import ConfigError
from tests.support.etcd_server import WHY_NONE, EtcdProcess
from tests.support.patience import PATIENCE_S
async def main():
    await FileDiscovery(sys.argv[1], lease_s=0.6).put("workers/a", b"1")
    print("ready", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_a_file_that_was_replaced_twice_is_read_at_the_next_look(tmp_path: Path) -> None:
    """The file system may give the third file the inode of the first one."""
    files, path = _CardFiles(tmp_path, 60.0), tmp_path / "workers%2Fa.key"
    path.write_bytes(b"serving")
    for now_s in (100.0, 100.1, 100.2):
        files.look(now_s)
    assert files.view.present() == {"workers/a": b"serving"}
    path.write_bytes(b"drained")  # the inode stays
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 1))
    (tmp_path / "beside").touch()  # the directory gets another time, as by a replacement
    assert files.look(100.3)
    assert files.view.present() == {"workers/a": b"drained"}


async def test_keys_of_killed_processes_expire_and_of_stalled_ones_return(
    tmp_path: Path,
) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE)
    store = FileDiscovery(str(tmp_path), lease_s=0.6)
    try:
        changes = store.watch("workers/")
        assert await take(changes, 1) == [Put("workers/a", b"1")]
        owner.send_signal(signal.SIGSTOP)
        assert await take(changes, 1) == [Deleted("workers/a", has_lapsed=True)]
        owner.send_signal(signal.SIGCONT)
        assert await take(changes, 1) == [Put("workers/a", b"1")]
        owner.kill()
        assert await take(changes, 1) == [Deleted("workers/a", has_lapsed=True)]
    finally:
        owner.kill()
        owner.wait()
        await store.close()


async def test_owners_with_other_clocks_stay(tmp_path: Path) -> None:
    """The clocks of two hosts that share a volume may differ by more than a lease."""
    store = FileDiscovery(str(tmp_path), lease_s=1.0)
    changes = store.watch("")
    paths = {offset_s: tmp_path / f"workers%2F{name}.key" for name, offset_s in (("late", -60.0), ("early", 60.0))}
    for offset_s, path in paths.items():
        path.write_bytes(b"1")
        os.utime(path, (time.time() + offset_s,) * 2)
    seen = {(await take(changes, 1))[0].key}
    for _ in range(10):
        await asyncio.sleep(0.2)
        for offset_s, path in paths.items():
            os.utime(path, (time.time() + offset_s,) * 2)
    seen |= {change.key for change in await take(changes, 1)}
    assert seen == {"workers/late", "workers/early"}
    assert all(path.exists() for path in paths.values()), "nobody removes the card of another"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(changes), 0.3)
    await store.close()


async def test_a_file_of_a_dead_process_is_not_shown_beside_live_ones(tmp_path: Path) -> None:
    (tmp_path / "workers%2Fdead.key").write_bytes(b"1")
    os.utime(tmp_path / "workers%2Fdead.key", (time.time() - 60,) * 2)
    (tmp_path / "workers%2Flive.key").write_bytes(b"1")
    store = FileDiscovery(str(tmp_path))
    changes = store.watch("")
    assert await take(changes, 1) == [Put("workers/live", b"1")]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(changes), 0.5)
    await store.close()


async def test_a_removed_directory_removes_no_key(tmp_path: Path) -> None:
    store = FileDiscovery(str(tmp_path / "run"), lease_s=3.0)
    changes = store.watch("")
    await store.put("workers/a", b"1")
    await take(changes, 1)
    for _ in range(5):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(pending := asyncio.ensure_future(anext(changes))), 0.3)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        changes = store.watch("")
        await take(changes, 1)
    await store.close()


async def test_a_key_that_cannot_be_renewed_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = FileDiscovery(str(tmp_path), lease_s=1.0), FileDiscovery(str(tmp_path), lease_s=1.0)
    await store.put("workers/a", b"1")
    await store.put("workers/b", b"2")
    changes = other.watch("")
    await take(changes, 2)
    renew = os.utime

    def refuse(path: Path, *times: object) -> None:
        if "%2Fa" in str(path):
            raise PermissionError(13, "Permission denied")
        renew(path)

    monkeypatch.setattr(os, "utime", refuse)
    assert await take(changes, 1) == [Deleted("workers/a", has_lapsed=True)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(changes), 1.5)
    await store.close()
    await other.close()


async def test_a_live_lease_outlasts_its_term(tmp_path: Path) -> None:
    store = FileDiscovery(str(tmp_path), lease_s=1.0)
    await store.put("workers/a", b"1")
    path = tmp_path / "workers%2Fa.key"
    os.utime(path, (time.time() - 0.6, time.time() - 0.6))
    changes = store.watch("")
    await take(changes, 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(changes), 1.5)
    await store.close()


@pytest.mark.parametrize("is_watched", [True, False], ids=["watch", "put"])
async def test_a_directory_that_cannot_be_read_is_a_config_error(tmp_path: Path, is_watched: bool) -> None:
    path = tmp_path / "file"
    path.write_text("no directory")
    store = FileDiscovery(str(path))
    with pytest.raises(ConfigError, match=r"cannot be read: .*; give this user access"):
        await (anext(store.watch("")) if is_watched else store.put("workers/a", b"1"))
    await store.close()


async def test_a_directory_that_cannot_be_written_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileDiscovery(str(tmp_path))

    def refuse(path: Path, data: bytes) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(ConfigError, match="cannot be written to: Permission denied; give this user access"):
        await store.put("workers/a", b"1")
    await store.close()


async def test_a_directory_that_stays_away_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "run"
    store = FileDiscovery(str(directory))
    changes = store.watch("")
    await store.put("workers/a", b"1")
    await take(changes, 1)
    shutil.rmtree(directory)
    directory.write_text("no directory")
    async with asyncio.timeout(PATIENCE_S):
        while not caplog.records:
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # five looks
    assert [record.getMessage() for record in caplog.records] == [caplog.records[0].getMessage()]
    await store.close()
