"""Test KV events over a real NATS server, beyond tests/contracts/test_kv_events.py."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.js.api import StreamConfig
from nats.js.errors import ServerError

from kvmesh.kvevents.connect import Links
from kvmesh.kvevents.cursor import Mode
from kvmesh.kvevents.nats import jetstream
from kvmesh.kvevents.nats import transport as nats
from kvmesh.kvevents.nats.access import NatsAccess
from kvmesh.kvevents.nats.links import NatsLinks
from kvmesh.kvevents.nats.transport import NatsKvEventPublisher, NatsLink, NatsServer, split_endpoint
from kvmesh.kvevents.subscriber import KvEventSubscriber, Patience
from kvmesh.kvevents.transport import KvSource, Snapshot
from kvmesh.protocol.errors import ConfigError
from tests.support.kv_events import W1, Index, blocks, payload
from tests.support.nats_server import WHY_NONE, NatsProcess
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)
PATIENCE = Patience(answer_s=1.0, tries=2, backoff_s=0.01)
SUBJECT = f"{jetstream.SUBJECTS}.{W1}.0.test"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits for a server."""
    for module, name in ((nats, "_ACK_S"), (nats, "_CLOSE_S"), (jetstream, "_TIMEOUT_S"), (jetstream, "_HEARTBEAT_S")):
        monkeypatch.setattr(module, name, 0.2)
    monkeypatch.setattr(jetstream, "_RECONNECT_S", 0.05)
    monkeypatch.setattr(jetstream, "_SILENCE_S", 1.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsProcess]:
    server = NatsProcess(tmp_path_factory.mktemp("nats"))
    yield server
    server.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsProcess]:
    server = NatsProcess(tmp_path)
    yield server
    server.stop()


@pytest_asyncio.fixture
async def index() -> Index:
    return Index()


@pytest_asyncio.fixture
async def subscriber(index: Index) -> AsyncIterator[KvEventSubscriber]:
    subscriber = KvEventSubscriber(index, patience=PATIENCE)
    yield subscriber
    await subscriber.close()


@pytest_asyncio.fixture
async def client(server: NatsProcess) -> AsyncIterator[Client]:
    client = Client()
    await jetstream.make_stream(await jetstream.connect(client, NatsAccess(server.url)))
    yield client
    await client.close()


class Ears:
    """Implements kvmesh.kvevents.transport.Listener: records live batches, without a replay."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.unreadable = 0
        self.ready = asyncio.Event()

    def on_live(self, seq: int, payload: bytes) -> None:
        self.heard.append(seq)

    def on_unreadable(self, what: str) -> None:
        self.unreadable += 1

    def on_disconnected(self) -> None:
        raise AssertionError("a NATS link knows its publisher by name")

    def on_reconnected(self) -> None:
        self.ready.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def listen(publisher: NatsKvEventPublisher, durable: str) -> tuple[NatsServer, Ears]:
    url, subject = split_endpoint(publisher.endpoint)
    server, ears = NatsServer(NatsAccess(url), durable), Ears()
    NatsLink(server, subject, ears)
    async with asyncio.timeout(PATIENCE_S):
        await ears.ready.wait()
    return server, ears


# --- a server that goes away --------------------------------------------------------------------------


async def test_nothing_is_lost_when_the_server_restarts(
    own_server: NatsProcess, index: Index, subscriber: KvEventSubscriber
) -> None:
    publisher = NatsKvEventPublisher(own_server.url, W1)
    subscriber.add(KvSource(W1, publisher.endpoint))
    for number in range(50):
        publisher.publish(blocks(number))
    await index.holds(*range(50))
    own_server.kill()
    for number in range(50, 100):
        publisher.publish(blocks(number))
    own_server.start()
    await index.holds(*range(100))
    publisher.publish(blocks(100))
    await index.holds(*range(101))
    assert (publisher.lost, index.resets, len(index.batches)) == (0, 0, 101)
    await publisher.close()


async def test_a_server_that_is_started_last_gets_everything(
    tmp_path: Path, index: Index, subscriber: KvEventSubscriber
) -> None:
    server = NatsProcess(tmp_path)
    server.stop()
    publisher = NatsKvEventPublisher(server.url, W1)
    subscriber.add(KvSource(W1, publisher.endpoint))
    publisher.publish(blocks(1))
    await asyncio.sleep(0.05)
    server.start()
    publisher.publish(blocks(2))
    await index.holds(1, 2)
    await publisher.close()
    server.stop()


async def test_batches_dropped_from_the_queue_leave_a_gap(
    own_server: NatsProcess, index: Index, subscriber: KvEventSubscriber, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = NatsKvEventPublisher(own_server.url, W1, max_queued_batches=5)

    async def snapshot() -> Snapshot:
        return Snapshot(publisher.last_seq, [payload(*range(publisher.last_seq + 1))])

    subscriber.add(KvSource(W1, publisher.endpoint, snapshot=snapshot))
    publisher.publish(blocks(0))
    await index.holds(0)
    await publisher._all_stored.wait()
    own_server.kill()
    for number in range(1, 20):
        publisher.publish(blocks(number))
    assert publisher.lost == 14
    assert "routers take snapshots" in caplog.text
    own_server.start()
    await index.holds(*range(20))
    publisher.publish(blocks(20))
    await index.holds(*range(21))
    assert subscriber.stats["snapshots"] >= 1
    await publisher.close()


async def test_a_batch_that_the_server_refuses_holds_up_nobody(tmp_path: Path, index: Index) -> None:
    (tmp_path / "nats.conf").write_text("max_payload: 2KB\n")
    server = NatsProcess(tmp_path, "-c", str(tmp_path / "nats.conf"))
    publisher = NatsKvEventPublisher(server.url, W1)
    subscriber = KvEventSubscriber(index, patience=PATIENCE)
    subscriber.add(KvSource(W1, publisher.endpoint))
    publisher.publish(blocks(*range(1000)))
    publisher.publish(blocks(1))
    await index.holds(1)
    assert publisher.lost == 1
    await subscriber.close()
    await publisher.close()
    server.stop()


async def test_without_a_server_closing_takes_no_longer_than_promised(tmp_path: Path) -> None:
    publisher = NatsKvEventPublisher("nats://127.0.0.1:9", W1)
    publisher.publish(blocks(1))
    subscriber = KvEventSubscriber(Index(), patience=PATIENCE)
    subscriber.add(KvSource(W1, publisher.endpoint))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(PATIENCE_S):
        await subscriber.close()
        await publisher.close()


# --- durable consumers --------------------------------------------------------------------------------


async def test_a_returning_follower_gets_each_missed_batch_once(server: NatsProcess) -> None:
    publisher = NatsKvEventPublisher(server.url, W1)
    first, ears = await listen(publisher, "router-a")
    for number in range(5):
        publisher.publish(blocks(number))
    await until(lambda: ears.heard == [0, 1, 2, 3, 4])
    await asyncio.sleep(0.5)  # the server is told with its next heartbeat
    await first.close()
    for number in range(5, 9):
        publisher.publish(blocks(number))
    second, ears = await listen(publisher, "router-a")
    await until(lambda: ears.heard == [5, 6, 7, 8])
    publisher.publish(blocks(9))
    await until(lambda: ears.heard == [5, 6, 7, 8, 9])
    await second.close()
    await publisher.close()


async def test_a_durable_follower_goes_on_after_the_server_was_killed(own_server: NatsProcess) -> None:
    publisher = NatsKvEventPublisher(own_server.url, W1)
    follower, ears = await listen(publisher, "router-a")
    publisher.publish(blocks(0))
    await until(lambda: ears.heard == [0])
    own_server.kill()
    publisher.publish(blocks(1))
    own_server.start()
    await until(lambda: set(ears.heard) == {0, 1})
    publisher.publish(blocks(2))
    await until(lambda: ears.heard[-1] == 2)
    await follower.close()
    await publisher.close()


async def test_followers_of_one_name_keep_their_own_batches(
    server: NatsProcess, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = NatsKvEventPublisher(server.url, W1)
    followers = [await listen(publisher, "router-b") for _ in range(2)]
    for number in range(20):
        publisher.publish(blocks(number))
    for follower, ears in followers:
        await until(lambda heard=ears.heard: heard == list(range(20)))  # type: ignore[misc]
        await follower.close()
    assert "give each router a name of its own" in caplog.text
    await publisher.close()


# --- the stream ---------------------------------------------------------------------------------------


async def test_a_replay_begins_at_any_number(server: NatsProcess) -> None:
    publishers = [NatsKvEventPublisher(server.url, W1) for _ in range(3)]
    for number in range(30):
        for publisher in publishers[: 1 + number % 3]:
            publisher.publish(blocks(number))
        await publishers[0]._all_stored.wait()
    follower, _ = await listen(publishers[1], "")
    _, subject = split_endpoint(publishers[1].endpoint)
    for start in (0, 1, 7, 18, 19, 20, 100):
        got: list[int] = []
        await follower.replay(subject, start, lambda seq, _, got=got: not got.append(seq), 5.0)  # type: ignore[misc]
        assert got == list(range(start, 20))
    got = []
    await follower.replay(subject, 3, lambda seq, _: got.append(seq) or len(got) < 2, 5.0)  # type: ignore[func-returns-value]
    assert got[:2] == [3, 4]
    await follower.close()
    for publisher in publishers:
        await publisher.close()


async def test_a_message_that_is_no_batch_is_counted(server: NatsProcess, client: Client) -> None:
    follower, ears = NatsServer(NatsAccess(server.url), ""), Ears()
    NatsLink(follower, SUBJECT, ears)
    async with asyncio.timeout(PATIENCE_S):
        await ears.ready.wait()
    for headers in (None, {"Nats-Msg-Id": "no-number"}, {"Nats-Msg-Id": "x-99999999999999999999"}):
        await client.publish(SUBJECT, b"x", headers=headers)
    await client.publish(SUBJECT, b"x", headers={"Nats-Msg-Id": "x-7"})
    await until(lambda: ears.heard == [7])
    assert ears.unreadable == 3
    await follower.close()


async def test_a_stream_made_by_an_operator_is_used_unchanged(
    own_server: NatsProcess, index: Index, subscriber: KvEventSubscriber
) -> None:
    client = Client()
    stream = await jetstream.connect(client, NatsAccess(own_server.url))
    config = StreamConfig(name=jetstream.STREAM, subjects=[f"{jetstream.SUBJECTS}.>"], max_msgs=3)
    await stream.add_stream(config)
    publisher = NatsKvEventPublisher(own_server.url, W1)
    for number in range(10):
        publisher.publish(blocks(number))
    await publisher._all_stored.wait()
    subscriber.add(KvSource(W1, publisher.endpoint))
    await index.holds(7, 8, 9)
    await publisher.close()
    await client.close()


async def test_a_server_that_lost_its_store_gets_a_new_stream(tmp_path: Path, index: Index) -> None:
    server = NatsProcess(tmp_path)
    publisher = NatsKvEventPublisher(server.url, W1)

    async def snapshot() -> Snapshot:
        return Snapshot(publisher.last_seq, [payload(*range(publisher.last_seq + 1))])

    subscriber = KvEventSubscriber(index, patience=PATIENCE)
    subscriber.add(KvSource(W1, publisher.endpoint, snapshot=snapshot))
    publisher.publish(blocks(0))
    await index.holds(0)
    server.kill()
    server.forget()
    server.start()
    publisher.publish(blocks(1))
    await index.holds(0, 1)
    publisher.publish(blocks(2))
    await index.holds(0, 1, 2)
    await subscriber.close()
    await publisher.close()
    server.stop()


# --- addresses ----------------------------------------------------------------------------------------


async def test_passwords_are_not_told_to_others() -> None:
    publisher = NatsKvEventPublisher("nats://user:secret@127.0.0.1:9", W1)
    assert publisher.endpoint.startswith(f"nats://127.0.0.1:9/{jetstream.SUBJECTS}.user.w1.0.")
    await publisher.close()


@pytest.mark.parametrize("url", ["127.0.0.1:4222", "nats://", "http://x", "nats://h:99999999", "nats://h/path"])
def test_what_is_no_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no NATS server"):
        NatsKvEventPublisher(url, W1)


@pytest.mark.parametrize("subject", ["", "/", "/other.subject", f"/{jetstream.SUBJECTS}.>", f"/{SUBJECT}.*", "/a b"])
async def test_a_subject_of_nobody_is_refused(subscriber: KvEventSubscriber, subject: str) -> None:
    with pytest.raises(ConfigError, match="cannot follow KV events at 'nats"):
        subscriber.add(KvSource(W1, f"nats://127.0.0.1:9{subject}"))


async def test_a_server_without_jetstream_is_reported_with_its_flag(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = NatsProcess(tmp_path, jetstream=False)
    publisher = NatsKvEventPublisher(server.url, W1)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while "start nats-server with -js" not in caplog.text:
                await asyncio.sleep(0.01)
    finally:
        await publisher.close()
        server.stop()


async def test_too_little_storage_is_a_state_of_publisher_and_follower(tmp_path: Path, index: Index) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(f'jetstream {{ store_dir: "{tmp_path}", max_file_store: 1MB, max_memory_store: 1MB }}\n')
    server = NatsProcess(tmp_path, "-c", str(config), jetstream=False)
    publisher = NatsKvEventPublisher(server.url, W1)
    subscriber = KvEventSubscriber(index, patience=PATIENCE, links=Links(nats_url=server.url))
    try:
        subscriber.add(KvSource(W1, publisher.endpoint))
        publisher.publish(blocks(0))
        await until(lambda: "raise max_file_store" in publisher.problem)
        await until(lambda: subscriber._feeds[W1, 0]._cursor.mode is Mode.LIVE)  # it has given up asking
        assert not subscriber.is_live(W1)
        assert subscriber.count_live() == (0, 1)
        server.stop()
        await until(lambda: "is lost" in publisher.problem)
        config.write_text(f'jetstream {{ store_dir: "{tmp_path}", max_file_store: 2GB, max_memory_store: 1MB }}\n')
        server.start()
        await index.holds(0)
        await until(lambda: not publisher.problem and subscriber.is_live(W1))
    finally:
        await subscriber.close()
        await publisher.close()
        server.stop()


# --- user and password --------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[NatsProcess]:
    """A server that lets in nobody but one user."""
    (tmp_path / "nats.conf").write_text('authorization { user: mesh, password: "s3cret-w0rd" }\n')
    (tmp_path / "password").write_text("s3cret-w0rd\n")
    server = NatsProcess(tmp_path, "-c", str(tmp_path / "nats.conf"))
    yield server
    server.stop()


async def test_events_pass_a_server_that_wants_a_password(guarded: NatsProcess, index: Index, tmp_path: Path) -> None:
    url = f"{guarded.url}?user=mesh&password-file={tmp_path / 'password'}"
    publisher = NatsKvEventPublisher(url, W1)
    assert publisher.endpoint.startswith(f"{guarded.url}/"), "the card has no password"
    subscriber = KvEventSubscriber(index, patience=PATIENCE, links=Links(nats_url=url))
    subscriber.add(KvSource(W1, publisher.endpoint))
    publisher.publish(blocks(0))
    await index.holds(0)
    await subscriber.close()
    await publisher.close()


async def test_a_password_is_told_to_its_server_alone(
    guarded: NatsProcess, own_server: NatsProcess, tmp_path: Path
) -> None:
    links = NatsLinks("", f"{guarded.url}?user=mesh&password-file={tmp_path / 'password'}", False)
    for server in (guarded, own_server):
        links.open(KvSource(W1, f"{server.url}/{SUBJECT}"), Ears())
    told = {url: server._access.password for url, server in links._servers.items()}
    assert told == {guarded.url: "s3cret-w0rd", own_server.url: ""}
    await links.close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("?user=mesh", "only one of user and password-file"),
        ("?user=mesh&password-file=/nowhere/at/all", "cannot read password-file=/nowhere/at/all"),
        ("?token=a", "unknown option of nats://127.0.0.1:9: token"),
    ],
)
def test_access_that_cannot_be_used_is_refused(options: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Links(nats_url=f"nats://127.0.0.1:9{options}")


def test_a_refused_address_shows_no_password() -> None:
    with pytest.raises(ConfigError, match=r"'http://127\.0\.0\.1:9'") as refused:
        Links(nats_url="http://mesh:s3cret@127.0.0.1:9")
    assert "s3cret" not in str(refused.value)


def test_too_little_storage_has_a_reason_that_says_what_to_do() -> None:
    for code in (10023, 10028, 10047):
        refused = ServerError(code=500, err_code=code, description="insufficient storage resources")
        assert "raise max_file_store" in jetstream._reason(refused)
    assert "max_file_store" not in jetstream._reason(ServerError(code=500, err_code=1))
