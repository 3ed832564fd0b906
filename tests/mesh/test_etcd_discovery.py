"""Tests of discovery through etcd, with a real server that is killed, paused, compacted and restarted empty."""

import asyncio
import logging
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.mesh.discovery import Change, Deleted, Put, open_discovery
from kvmesh.mesh.discovery.etcd.discovery import (
    CALL_TIMEOUT_S,
    LOGIN_TIMEOUT_S,
    EtcdDiscovery,
    EtcdSettings,
    _Connection,
    read_settings,
)
from kvmesh.protocol.errors import ConfigError, UnreachableError
from tests.support.etcd_server import WHY_NONE, EtcdProcess
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port
from tests.support.recovery import RECOVERED_S

needs_etcd = pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    server = EtcdProcess(tmp_path)
    yield server
    server.stop()


def opened(etcd: EtcdProcess, options: str = "?lease-s=2", prefix: str = "mesh") -> EtcdDiscovery:
    return EtcdDiscovery(f"{etcd.endpoint}/{prefix}{options}")


async def take(changes: AsyncIterator[Change], count: int = 1) -> list[Change]:
    return [await asyncio.wait_for(anext(changes), PATIENCE_S) for _ in range(count)]


async def nothing_comes(changes: AsyncIterator[Change], seconds: float) -> AsyncIterator[Change]:
    """Assert that no change comes for a while; return the watch, which can be used on."""
    pending = asyncio.ensure_future(anext(changes))
    await asyncio.wait({pending}, timeout=seconds)
    assert not pending.done(), pending.result()

    async def rest() -> AsyncIterator[Change]:
        yield await pending
        async for change in changes:
            yield change

    return rest()


# --- where it searches ---------------------------------------------------------------------------------


def test_the_place_shows_neither_options_nor_passwords(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret")
    store = EtcdDiscovery(f"me:hush@a:1,b/site?user=root&password-file={tmp_path / 'password'}")
    assert (store.where().name, store.where().status()) == ("etcd:a:1,b:2379/site", "not reached yet")


@needs_etcd
async def test_the_place_says_since_when_etcd_is_away(etcd: EtcdProcess) -> None:
    store = opened(etcd)

    async def until(status: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not store.where().status().startswith(status):
                await asyncio.sleep(0.01)

    await store.put("workers/a", b"1")
    await until("reached")
    etcd.kill()
    await until("away since 20")
    since = store.where().away_since_unix_s
    assert since is not None
    assert abs(since - time.time()) < PATIENCE_S
    await asyncio.sleep(0.5)
    assert store.where().away_since_unix_s == since, "a further failure does not change since when"
    etcd.start()
    await until("reached")
    await store.close()


# --- settings -----------------------------------------------------------------------------------------


def test_a_url_names_endpoints_and_prefix() -> None:
    settings = read_settings("//a:1,b,[::1]:3,[::1]/site/one/?lease-s=30")
    assert settings.endpoints == ("a:1", "b:2379", "[::1]:3", "[::1]:2379")
    assert (settings.prefix, settings.lease_s) == ("site/one", 30)
    assert read_settings("a").prefix == "kvmesh"


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ("/kvmesh", "no endpoint"),
        ("a?lease-s=1", "lease-s=1"),
        ("a?lease-s=x", "lease-s=x"),
        ("a?colour=red", "unknown option of etcd: colour"),
        ("a?cert=x", "only one of cert and key"),
        ("a?user=x", "only one of user and password-file"),
        ("a?ca=/nothing", "cannot read ca=/nothing"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(rest: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_discovery(f"etcd:{rest}")


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret\n")
    settings = read_settings(f"a?user=u&password-file={tmp_path / 'password'}")
    assert settings.password == "secret"
    assert "secret" not in repr(settings)


async def test_without_etcd_one_error_says_where_it_was_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.mesh.discovery.etcd.discovery.START_TIMEOUT_S", 0.5)
    ports = free_port(), free_port()
    store = EtcdDiscovery(f"127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}")
    with pytest.raises(UnreachableError, match=f"no etcd answers at 127.0.0.1:{ports[0]}, 127.0.0.1:{ports[1]}: "):
        await store.put("workers/a", b"1")
    await store.close()


class _BusyAuth:
    """Logs in on a busy machine: it takes longer than other calls may, and the first try fails."""

    TOOK_S = CALL_TIMEOUT_S + 3.0

    def __init__(self) -> None:
        self.asked_s: list[float] = []

    def Authenticate(self, request: object, timeout: float, metadata: object = ()) -> SimpleNamespace:  # noqa: N802
        self.asked_s.append(timeout)
        if timeout < self.TOOK_S:
            raise AssertionError("the login is given up while etcd computes it")
        return SimpleNamespace(token="t")


def test_a_login_may_take_longer_than_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    auth = _BusyAuth()
    monkeypatch.setattr("kvmesh.mesh.discovery.etcd.discovery.rpc.AuthStub", lambda channel: auth)
    settings = EtcdSettings(("127.0.0.1:1",), "p", user="u", password="secret")
    with _Connection("127.0.0.1:1", settings):
        assert auth.asked_s == [LOGIN_TIMEOUT_S]


@pytest.mark.parametrize(("user", "least_s"), [("", 0.2), ("?user=u&password-file={}", 1.2)])
async def test_the_first_answer_may_take_longer_with_a_password(
    user: str, least_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.mesh.discovery.etcd.discovery.START_TIMEOUT_S", 0.2)
    (tmp_path / "password").write_text("secret")
    began_s = time.monotonic()
    store = EtcdDiscovery(f"127.0.0.1:{free_port()}/p{user.format(tmp_path / 'password')}")
    with pytest.raises(UnreachableError):
        await store.put("workers/a", b"1")
    assert time.monotonic() - began_s >= least_s
    await store.close()


# --- a server that fails ------------------------------------------------------------------------------


@needs_etcd
async def test_prefixes_are_meshes_of_their_own(etcd: EtcdProcess) -> None:
    one, other = opened(etcd, prefix="one"), opened(etcd, prefix="other")
    await one.put("workers/a", b"1")
    await other.put("workers/b", b"2")
    assert await take(one.watch("")) == [Put("workers/a", b"1")]
    assert await take(other.watch("")) == [Put("workers/b", b"2")]
    await one.close()
    await other.close()
    assert etcd.ctl("get", "", "--prefix", "--keys-only").strip() == ""


@needs_etcd
async def test_a_restarted_server_loses_nobody(etcd: EtcdProcess, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvmesh.mesh.discovery.etcd.discovery")
    store, other = opened(etcd), opened(etcd)
    changes = other.watch("")
    await store.put("workers/a", b"1")
    await take(changes)
    etcd.kill()
    changes = await nothing_comes(changes, 3.0)
    etcd.start()
    changes = await nothing_comes(changes, 3.0)
    await store.put("workers/b", b"2")
    assert await take(changes) == [Put("workers/b", b"2")]
    assert len([r for r in caplog.records if "is away" in r.getMessage()]) == 2, "one line for each of the two"
    await store.close()
    await other.close()


@needs_etcd
async def test_owners_register_again_at_an_empty_server(etcd: EtcdProcess) -> None:
    store, other = opened(etcd), opened(etcd)
    changes = other.watch("")
    await store.put("workers/a", b"1")
    await take(changes)
    etcd.kill()
    etcd.forget()
    etcd.start()
    changes = await nothing_comes(changes, 4.0)
    assert etcd.ctl("get", "/mesh/workers/a", "--print-value-only").strip() == "1"
    await store.close()
    assert await take(changes) == [Deleted("workers/a")]
    await other.close()


@needs_etcd
async def test_a_paused_server_removes_nobody(etcd: EtcdProcess) -> None:
    store, other = opened(etcd), opened(etcd)
    changes = other.watch("")
    await store.put("workers/a", b"1")
    await take(changes)
    etcd.pause()
    changes = await nothing_comes(changes, 4.0)
    etcd.resume()
    async with asyncio.timeout(PATIENCE_S):
        while not etcd.ctl("get", "/mesh/workers/a", "--print-value-only").strip():
            await asyncio.sleep(0.1)
    await store.put("workers/b", b"2")
    seen: dict[str, Change] = {}
    while "workers/b" not in seen:
        [change] = await take(changes)
        seen[change.key] = change
    await store.close()
    await other.close()


@needs_etcd
async def test_a_compaction_loses_no_change(etcd: EtcdProcess) -> None:
    store, other = opened(etcd), opened(etcd)
    changes = other.watch("")
    await store.put("workers/a", b"1")
    await take(changes)
    etcd.kill()
    etcd.start()
    for n in range(5):
        etcd.ctl("put", f"/mesh/workers/x{n}", "0")
    etcd.compact()
    etcd.ctl("put", "/mesh/workers/y", "9")
    seen: set[str] = set()
    async with asyncio.timeout(PATIENCE_S):
        while "workers/y" not in seen:
            seen.add((await anext(changes)).key)
    await store.close()
    await other.close()


@needs_etcd
async def test_a_lease_that_somebody_revoked_is_taken_again(etcd: EtcdProcess) -> None:
    store = opened(etcd)
    changes = store.watch("")
    await store.put("workers/a", b"1")
    await take(changes)
    [lease] = etcd.ctl("lease", "list").split()[-1:]
    etcd.ctl("lease", "revoke", lease)
    assert await take(changes, 2) == [Deleted("workers/a", has_lapsed=True), Put("workers/a", b"1")]
    await store.close()


@needs_etcd
async def test_the_next_endpoint_is_asked(etcd: EtcdProcess) -> None:
    store = EtcdDiscovery(f"127.0.0.1:{free_port()},{etcd.endpoint}")
    await store.put("workers/a", b"1")
    assert await take(store.watch("")) == [Put("workers/a", b"1")]
    await store.close()


@needs_etcd
async def test_a_key_that_was_put_while_etcd_was_away_comes_later(etcd: EtcdProcess) -> None:
    store, other = opened(etcd), opened(etcd)
    changes = other.watch("")
    await store.put("workers/a", b"1")
    await take(changes)
    etcd.kill()
    await asyncio.wait_for(store.put("workers/b", b"2"), PATIENCE_S)
    etcd.start()
    assert await take(changes) == [Put("workers/b", b"2")]
    await store.close()
    await other.close()


@needs_etcd
async def test_closing_while_etcd_is_away_takes_no_time(etcd: EtcdProcess) -> None:
    store = opened(etcd)
    await store.put("workers/a", b"1")
    etcd.kill()
    began_s = time.monotonic()
    await store.close()
    assert time.monotonic() - began_s < RECOVERED_S
    etcd.start()


@needs_etcd
async def test_a_caller_that_is_cancelled_leaves_the_others_their_lease(
    etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(etcd)
    starting = asyncio.create_task(anext(store.watch("")))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait_for(store.put("workers/a", b"1"), PATIENCE_S)
    slow_puts(monkeypatch)
    putting = asyncio.create_task(store.put("workers/b", b"2"))
    await asyncio.sleep(0.1)
    putting.cancel()
    await asyncio.wait_for(store.put("workers/c", b"3"), PATIENCE_S)
    await asyncio.sleep(3.0)
    assert etcd.ctl("get", "/mesh/workers/a", "--print-value-only").strip() == "1"
    await store.close()


@needs_etcd
async def test_all_who_put_one_value_are_told(etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(etcd)
    await store.put("workers/a", b"1")
    slow_puts(monkeypatch)
    first = asyncio.create_task(store.put("workers/b", b"2"))
    await asyncio.sleep(0.1)
    await asyncio.wait_for(store.put("workers/b", b"2"), PATIENCE_S)
    await asyncio.wait_for(first, PATIENCE_S)
    await store.close()


@needs_etcd
async def test_nobody_waits_for_a_store_that_was_closed(etcd: EtcdProcess) -> None:
    store = opened(etcd)
    await store.put("workers/a", b"1")
    await store.close()
    await store.close()
    await asyncio.wait_for(store.put("workers/b", b"2"), PATIENCE_S)
    assert etcd.ctl("get", "", "--prefix", "--keys-only").strip() == ""
    starting = EtcdDiscovery(f"127.0.0.1:{free_port()}")
    putting = asyncio.create_task(starting.put("workers/a", b"1"))
    await asyncio.sleep(0.1)
    await starting.close()
    with pytest.raises(UnreachableError, match="closed"):
        await asyncio.wait_for(putting, PATIENCE_S)


@needs_etcd
async def test_the_log_tells_of_every_outage(etcd: EtcdProcess, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(etcd)
    changes = store.watch("")
    for outage in (1, 2):
        await store.put("workers/a", b"%d" % outage)
        await take(changes)
        etcd.kill()
        changes = await nothing_comes(changes, 1.0)
        etcd.start()
        await store.put("workers/b", b"%d" % outage)
        await take(changes)
        assert len([r for r in caplog.records if "is away" in r.getMessage()]) == outage
    await store.close()


def slow_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    put = _Connection.put

    def slow_put(*arguments: Any) -> None:
        time.sleep(0.3)
        put(*arguments)

    monkeypatch.setattr(_Connection, "put", slow_put)


OWNER = """
import asyncio, sys
from kvmesh.mesh.discovery import open_discovery
async def main():
    await open_discovery(sys.argv[1]).put("workers/a", b"1")
    print("ready", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@needs_etcd
async def test_keys_of_killed_processes_lapse_and_of_stalled_ones_return(etcd: EtcdProcess) -> None:
    url = f"etcd:{etcd.endpoint}/mesh?lease-s=2"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, url], stdout=subprocess.PIPE)
    store = open_discovery(url)
    try:
        changes = store.watch("workers/")
        assert await take(changes) == [Put("workers/a", b"1")]
        owner.send_signal(signal.SIGSTOP)
        assert await take(changes) == [Deleted("workers/a", has_lapsed=True)]
        owner.send_signal(signal.SIGCONT)
        assert await take(changes) == [Put("workers/a", b"1")]
        owner.kill()
        assert await take(changes) == [Deleted("workers/a", has_lapsed=True)]
    finally:
        owner.kill()
        owner.wait()
        await store.close()


@needs_etcd
async def test_a_process_that_only_watches_leaves_a_member_that_has_lost_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clients, peers = [free_port() for _ in range(3)], [free_port() for _ in range(3)]
    cluster = ",".join(f"n{n}=http://127.0.0.1:{port}" for n, port in enumerate(peers))
    members: list[subprocess.Popen[bytes]] = []
    for n in range(3):
        client, peer = f"http://127.0.0.1:{clients[n]}", f"http://127.0.0.1:{peers[n]}"
        command = ["etcd", "--name", f"n{n}", "--data-dir", str(tmp_path / f"n{n}"), "--unsafe-no-fsync"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--initial-cluster", cluster]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        members.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    store = EtcdDiscovery(f"127.0.0.1:{clients[0]}/mesh?lease-s=2")
    other = EtcdDiscovery(f"127.0.0.1:{clients[1]}/mesh?lease-s=2")
    try:
        await other.put("workers/a", b"1")
        assert await take(store.watch("")) == [Put("workers/a", b"1")]
        for member in members[1:]:
            member.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S):
            while f"{clients[0]} is away" not in caplog.text:
                await asyncio.sleep(0.1)
    finally:
        for member in members:
            member.kill()
            member.wait()
        await store.close()
        await other.close()


# --- users and certificates ---------------------------------------------------------------------------


@needs_etcd
async def test_a_user_sees_and_writes_what_its_role_allows(etcd: EtcdProcess, tmp_path: Path) -> None:
    etcd.ctl("user", "add", "root:r")
    etcd.ctl("user", "grant-role", "root", "root")
    etcd.ctl("user", "add", "mesh:secret")
    etcd.ctl("role", "add", "mesh")
    etcd.ctl("role", "grant-permission", "mesh", "--prefix=true", "readwrite", "/mesh/")
    etcd.ctl("user", "grant-role", "mesh", "mesh")
    etcd.ctl("auth", "enable")
    (tmp_path / "good").write_text("secret\n")
    (tmp_path / "bad").write_text("wrong\n")
    store = opened(etcd, f"?user=mesh&password-file={tmp_path / 'good'}")
    await store.put("workers/a", b"1")
    assert await take(store.watch("")) == [Put("workers/a", b"1")]
    await store.close()
    for options, prefix in ((f"?user=mesh&password-file={tmp_path / 'bad'}", "mesh"), ("", "mesh")):
        with pytest.raises(ConfigError, match="refuses: "):
            await anext(opened(etcd, options, prefix).watch(""))
    with pytest.raises(ConfigError, match=r"permission denied .*access to /other/"):
        await anext(opened(etcd, f"?user=mesh&password-file={tmp_path / 'good'}", "other").watch(""))


@needs_etcd
async def test_a_key_that_may_not_be_written_is_a_config_error(
    etcd: EtcdProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The user may read the prefix, so only the first write is refused."""
    etcd.ctl("user", "add", "root:r")
    etcd.ctl("user", "grant-role", "root", "root")
    etcd.ctl("user", "add", "reader:secret")
    etcd.ctl("role", "add", "reader")
    etcd.ctl("role", "grant-permission", "reader", "--prefix=true", "read", "/mesh/")
    etcd.ctl("user", "grant-role", "reader", "reader")
    etcd.ctl("auth", "enable")
    (tmp_path / "password").write_text("secret")
    store = opened(etcd, f"?user=reader&password-file={tmp_path / 'password'}")
    with pytest.raises(ConfigError, match=r"permission denied .*read and write access to /mesh/"):
        await store.put("workers/a", b"1")
    assert not caplog.messages, "one error is enough"
    changes = asyncio.ensure_future(anext(store.watch("")))
    etcd.ctl("--user", "root:r", "put", "/mesh/workers/b", "2")
    assert await asyncio.wait_for(changes, PATIENCE_S) == Put("workers/b", b"2"), "it still reads"
    await store.close()


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, str]:
    """A certificate of 127.0.0.1 that signs itself, so that it is its own authority, and its key."""
    files = {"cert": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem")}
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-subj", "/CN=etcd", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", files["key"], "-out", files["cert"]], check=True, capture_output=True)
    return files


@needs_etcd
async def test_server_and_client_prove_themselves_by_certificates(tmp_path: Path, certificate: dict[str, str]) -> None:
    cert, key = certificate["cert"], certificate["key"]
    etcd = EtcdProcess(
        tmp_path,
        "--cert-file",
        cert,
        "--key-file",
        key,
        "--trusted-ca-file",
        cert,
        "--client-cert-auth",
        scheme="https",
    )
    try:
        store = opened(etcd, f"?ca={cert}&cert={cert}&key={key}")
        await store.put("workers/a", b"1")
        assert await take(store.watch("")) == [Put("workers/a", b"1")]
        await store.close()
        for options in ("", "?tls", f"?ca={cert}"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("kvmesh.mesh.discovery.etcd.discovery.START_TIMEOUT_S", 0.5)
                with pytest.raises(UnreachableError, match="no etcd answers"):
                    await anext(opened(etcd, options).watch(""))
    finally:
        etcd.stop()
