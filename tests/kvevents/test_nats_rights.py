"""Users of a real NATS server: a worker publishes its own events alone, a router follows and publishes nothing."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats.errors
import pytest
import pytest_asyncio
from nats.aio.client import Client

from kvmesh.kvevents.connect import Links
from kvmesh.kvevents.door import new_keys
from kvmesh.kvevents.nats import jetstream
from kvmesh.kvevents.nats.access import read_access
from kvmesh.kvevents.nats.command import main
from kvmesh.kvevents.nats.transport import NatsKvEventPublisher, check_subject
from kvmesh.kvevents.subscriber import KvEventSubscriber, Patience
from kvmesh.kvevents.transport import KvSource
from kvmesh.mesh.identity.names import MeshRole
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.ids import WorkerId
from tests.support.certificates import TestCa
from tests.support.kv_events import W1, Index, blocks
from tests.support.nats_server import WHY_NONE, NatsProcess

pytestmark = pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)
PATIENCE = Patience(answer_s=1.0, tries=2, backoff_s=0.01)
SECRET = "s3cret-w0rd"


@pytest.fixture
def server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[NatsProcess]:
    """A server with TLS, and with the users that the command prints."""
    assert main(["--workers", "decode,prefill", "--routers", "router"]) == 0
    conf = capsys.readouterr().out
    for user in ("decode", "prefill", "router"):
        monkeypatch.setenv(f"NATS_PASSWORD_{user.upper()}", f'"{SECRET}"')
    member = TestCa(tmp_path / "ca").issue(MeshRole.OBSERVER, "nats")
    files = {f"{name}_file": str(member / f"{name}.pem") for name in ("cert", "key", "ca")}
    conf += f"tls {json.dumps(files | {'verify': True})}\n"
    (tmp_path / "nats.conf").write_text(conf)
    (tmp_path / "password").write_text(SECRET)
    server = NatsProcess(tmp_path, "-c", str(tmp_path / "nats.conf"))
    yield server
    server.stop()


def url_of(server: NatsProcess, folder: Path, user: str) -> str:
    tls = folder / "ca" / "issued" / "observer-nats"
    files = f"ca={tls}/ca.pem&cert={tls}/cert.pem&key={tls}/key.pem"
    return f"tls://127.0.0.1:{server.port}?user={user}&password-file={folder / 'password'}&{files}"


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[Client, list[str]]]:
    """A client that says what its user may not do."""
    client, refused, access = Client(), list[str](), read_access(url)

    async def on_error(error: Exception) -> None:
        refused.append(str(error))

    await client.connect(
        access.url,
        user=access.user,
        password=access.password,
        tls=access.load_tls(),
        inbox_prefix=access.inbox.encode(),
        error_cb=on_error,
    )
    yield client, refused
    await client.close()


@pytest_asyncio.fixture
async def index() -> Index:
    return Index()


async def test_events_pass_with_tls_and_users(server: NatsProcess, tmp_path: Path, index: Index) -> None:
    publisher = NatsKvEventPublisher(url_of(server, tmp_path, "decode"), W1)
    assert publisher.endpoint.startswith(f"tls://127.0.0.1:{server.port}/{jetstream.SUBJECTS}.decode.w1.0.")
    links = Links(nats_url=url_of(server, tmp_path, "router"), keys=new_keys())
    follower = KvEventSubscriber(index, patience=PATIENCE, links=links)
    publisher.publish(blocks(0))
    follower.add(KvSource(W1, publisher.endpoint))
    await index.holds(0)
    publisher.publish(blocks(1))
    await index.holds(0, 1)
    await follower.close()
    await publisher.close()


async def test_events_go_on_after_the_server_was_restarted(server: NatsProcess, tmp_path: Path, index: Index) -> None:
    publisher = NatsKvEventPublisher(url_of(server, tmp_path, "decode"), W1)
    links = Links("router-0", url_of(server, tmp_path, "router"))
    follower = KvEventSubscriber(index, patience=PATIENCE, links=links)
    follower.add(KvSource(W1, publisher.endpoint))
    publisher.publish(blocks(0))
    await index.holds(0)
    server.kill()
    publisher.publish(blocks(1))
    server.start()
    await index.holds(0, 1)
    await follower.close()
    await publisher.close()


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("decode", f"{jetstream.SUBJECTS}.prefill.w2.0.abc"),
        ("decode", f"{jetstream.SUBJECTS}.w2.0.abc"),
        ("decode", f"$JS.API.STREAM.DELETE.{jetstream.STREAM}"),
        ("decode", f"$JS.API.STREAM.PURGE.{jetstream.STREAM}"),
        ("decode", f"$JS.API.STREAM.MSG.GET.{jetstream.STREAM}"),
        ("decode", f"$JS.API.CONSUMER.CREATE.{jetstream.STREAM}"),
        ("decode", "_INBOX_router.x"),
        ("router", f"{jetstream.SUBJECTS}.decode.w1.0.abc"),
        ("router", f"$JS.API.STREAM.DELETE.{jetstream.STREAM}"),
        ("router", f"$JS.API.STREAM.UPDATE.{jetstream.STREAM}"),
    ],
)
async def test_a_user_publishes_nothing_else(server: NatsProcess, tmp_path: Path, user: str, subject: str) -> None:
    async with connected(url_of(server, tmp_path, user)) as (client, refused):
        await client.publish(subject, b"{}")
        await client.flush()
        await asyncio.sleep(0.05)
        assert any(
            "Permissions Violation for Publish" in line or "permissions violation" in line for line in refused
        ), refused


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("decode", f"{jetstream.SUBJECTS}.>"),
        ("decode", "_INBOX_router.>"),
        ("decode", ">"),
        ("router", "_INBOX_decode.>"),
    ],
)
async def test_a_user_hears_nothing_else(server: NatsProcess, tmp_path: Path, user: str, subject: str) -> None:
    async with connected(url_of(server, tmp_path, user)) as (client, refused):
        await client.subscribe(subject)
        await client.flush()
        await asyncio.sleep(0.05)
        assert any("violation for subscription" in line.lower() for line in refused), refused


async def test_a_client_without_certificate_or_password_gets_nowhere(server: NatsProcess, tmp_path: Path) -> None:
    options = {"connect_timeout": 1, "allow_reconnect": False, "max_reconnect_attempts": 0}
    with pytest.raises((nats.errors.Error, OSError)):
        await Client().connect(f"nats://127.0.0.1:{server.port}", **options)  # type: ignore[arg-type]
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with pytest.raises((nats.errors.Error, OSError)):
        await Client().connect(f"tls://127.0.0.1:{server.port}", tls=trusting, **options)  # type: ignore[arg-type]
    access = read_access(url_of(server, tmp_path, "decode"))
    with pytest.raises(nats.errors.Error, match=r"[Aa]uthorization"):
        await Client().connect(access.url, tls=access.load_tls(), user="decode", password="no", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "subject", ["w2.0.abc", "w1.1.abc", "decode.w2.0.abc", "decode.more.w1.0.abc", "w1.0", "", "w1.0.a.b.c"]
)
def test_a_card_with_the_subject_of_another_is_refused(subject: str) -> None:
    with pytest.raises(ConfigError, match="is not its own"):
        check_subject(f"{jetstream.SUBJECTS}.{subject}", W1, 0)
    check_subject(f"{jetstream.SUBJECTS}.w1.0.abc", W1, 0)
    check_subject(f"{jetstream.SUBJECTS}.decode.w%2E1.2.abc", WorkerId("w.1"), 2)


async def test_a_closed_router_believes_its_own_server_alone() -> None:
    links = Links(nats_url="nats://10.0.0.1:4222", keys=new_keys())
    with pytest.raises(ConfigError, match="only the server of --nats-url"):
        links.open(KvSource(W1, f"nats://10.0.0.2:4222/{jetstream.SUBJECTS}.w1.0.abc"), None)  # type: ignore[arg-type]
    await links.close()


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("nats://h:1?ca=x", "unknown option of nats://h:1: ca; TLS is tls://h:1"),
        ("tls://h:1?cert=x", "only one of cert and key"),
        ("tls://h:1?ca=/nowhere", "cannot use the TLS files of tls://h:1"),
        ("https://h:1", "no NATS server"),
    ],
)
def test_tls_that_cannot_be_used_is_refused(url: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_access(url)


def test_a_user_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be a user"):
        main(["--workers", "a b"])
