"""Discovery through Kubernetes against a stand-in for the API server. tests/kube/ runs it against a real one."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from kvmesh.mesh.discovery import Change, Deleted, Put, open_discovery
from kvmesh.mesh.discovery.kubernetes import api as kubernetes_api
from kvmesh.mesh.discovery.kubernetes import follow as kubernetes_follow
from kvmesh.mesh.discovery.kubernetes import list_watch
from kvmesh.mesh.discovery.kubernetes.api import subject_of
from kvmesh.mesh.discovery.kubernetes.discovery import KubernetesDiscovery, read_settings
from kvmesh.mesh.discovery.kubernetes.objects import CardOwner, card_object, name_of
from kvmesh.protocol.errors import ConfigError, UnreachableError
from tests.support.fake_cluster import FakeCluster
from tests.support.patience import PATIENCE_S


class Cluster(FakeCluster):
    """A stand-in with a mesh `m` in the namespace `ns`."""

    def open(self, folder: Path, pod: str = "", **environ: str) -> KubernetesDiscovery:
        """Open discovery as a process of a pod does, or of none."""
        token = folder / "token"
        token.write_text(self.token)
        uid = self.objects["pods", "ns", pod]["metadata"]["uid"] if pod else ""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ({"POD_NAME": pod, "POD_UID": uid} | environ).items():
                patch.setenv(f"KVMESH_{name}", value)
            return KubernetesDiscovery(f"ns/m?api={self.url}&token-file={token}")


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    made.put_pod("ns", "p", "m")
    async with made.running():
        yield made


@pytest_asyncio.fixture
async def worker(cluster: Cluster, tmp_path: Path) -> AsyncIterator[KubernetesDiscovery]:
    made = cluster.open(tmp_path, "p")
    yield made
    await made.close()


@pytest_asyncio.fixture
async def frontend(cluster: Cluster, tmp_path: Path) -> AsyncIterator[KubernetesDiscovery]:
    made = cluster.open(tmp_path)
    yield made
    await made.close()


async def take(changes: AsyncIterator[Change], count: int = 1) -> list[Change]:
    return [await asyncio.wait_for(anext(changes), PATIENCE_S) for _ in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def keys(cluster: Cluster) -> list[str]:
    return sorted(card["spec"]["key"] for card in cluster.cards() if card["spec"].get("value"))


# --- what it asks for ---------------------------------------------------------------------------------


async def test_a_worker_asks_four_things_and_then_nothing(cluster: Cluster, worker: KubernetesDiscovery) -> None:
    await worker.put("workers/a", b"1")
    await until(lambda: ("watch", "meshcards") in cluster.calls)
    await asyncio.sleep(1.0)
    assert sorted(cluster.calls) == [
        ("get", "pods"),
        ("list", "meshcards"),
        ("patch", "meshcards"),
        ("watch", "meshcards"),
    ]


async def test_a_worker_hears_of_its_own_cards_alone(cluster: Cluster, worker: KubernetesDiscovery) -> None:
    await worker.put("workers/a", b"1")
    assert worker.where().ignored == ()
    other = CardOwner("q", "uid-q")
    cluster.put("meshcards", "ns", card_object("m", "workers/b", b"1", other))
    cluster.remove("meshcards", "ns", name_of("m", "workers/b"))
    await asyncio.sleep(0.2)
    assert cluster.writes() == 1


async def test_a_quiet_mesh_writes_nothing(
    cluster: Cluster, worker: KubernetesDiscovery, frontend: KubernetesDiscovery
) -> None:
    await worker.put("workers/a", b"1")
    changes = frontend.watch("")
    await take(changes)
    watches = [("watch", "meshcards"), ("watch", "meshcards"), ("watch", "pods")]
    await until(lambda: sorted(call for call in cluster.calls if call[0] == "watch") == watches)
    before = list(cluster.calls)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(changes), 2.0)
    assert cluster.calls == before


async def test_lists_come_in_pages(
    cluster: Cluster, worker: KubernetesDiscovery, frontend: KubernetesDiscovery
) -> None:
    cluster.page_objects = 3
    for number in range(10):
        await worker.put(f"workers/{number}", b"1")
    assert len(await take(frontend.watch("workers/"), 10)) == 10
    assert cluster.calls.count(("list", "meshcards")) > 4


# --- faults -------------------------------------------------------------------------------------------


async def test_a_server_that_is_away_changes_no_view(
    cluster: Cluster, worker: KubernetesDiscovery, frontend: KubernetesDiscovery, caplog: pytest.LogCaptureFixture
) -> None:
    await worker.put("workers/a", b"1")
    changes = frontend.watch("workers/")
    await take(changes)
    news = asyncio.ensure_future(anext(changes))
    await cluster.stop()
    await until(lambda: frontend.where().status().startswith("away since"))
    await asyncio.wait_for(worker.put("workers/a", b"2"), PATIENCE_S)
    assert not news.done()
    await cluster.start()
    assert await asyncio.wait_for(news, PATIENCE_S) == Put("workers/a", b"2")
    await until(lambda: frontend.where().status() == "reached")
    said = [record.getMessage() for record in caplog.records if "the last known services stay" in record.getMessage()]
    assert len(said) == 2, "once for each of the two processes"


async def test_cut_watches_list_again(
    cluster: Cluster, worker: KubernetesDiscovery, frontend: KubernetesDiscovery
) -> None:
    await worker.put("workers/a", b"1")
    changes = frontend.watch("workers/")
    await take(changes)
    for value in (b"2", b"3"):
        cluster.cut()
        await worker.put("workers/a", value)
        assert await take(changes) == [Put("workers/a", value)]


async def test_a_forgotten_revision_lists_again(
    cluster: Cluster, worker: KubernetesDiscovery, frontend: KubernetesDiscovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch that ends and finds its revision compacted gets 410 as an event."""
    monkeypatch.setattr(list_watch, "WATCH_S", 2.0)
    await worker.put("workers/a", b"1")
    changes = frontend.watch("workers/")
    await take(changes)
    cluster.compact()
    lists = cluster.calls.count(("list", "meshcards"))
    await until(lambda: cluster.calls.count(("list", "meshcards")) > lists)
    await worker.put("workers/a", b"2")
    assert await take(changes) == [Put("workers/a", b"2")]
    assert frontend.where().status() == "reached"


async def test_a_server_that_lost_all_gets_the_cards_again(
    cluster: Cluster, worker: KubernetesDiscovery, frontend: KubernetesDiscovery
) -> None:
    await worker.put("workers/a", b"1")
    changes = frontend.watch("workers/")
    await take(changes)
    pod = cluster.objects["pods", "ns", "p"]
    await cluster.stop()
    cluster.forget()
    cluster.put("pods", "ns", pod)
    await cluster.start()
    await until(lambda: keys(cluster) == ["workers/a"])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(changes), 1.0)


@pytest.mark.parametrize("content", [b"\xff", b"{}", b'{"type":"ADDED"}', b'{"type":"ADDED","object":7}', b"[" * 9999])
async def test_an_event_that_cannot_be_read_ends_the_watch(
    cluster: Cluster, frontend: KubernetesDiscovery, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.fake_cluster.line", lambda kind, what: content + b"\n")
    watching = asyncio.ensure_future(anext(frontend.watch("")))
    await until(lambda: cluster.calls.count(("list", "pods")) > 1)
    assert not watching.done()
    watching.cancel()


async def test_a_line_without_an_end_is_cut(
    cluster: Cluster, frontend: KubernetesDiscovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "MAX_LINE_BYTES", 10_000)
    monkeypatch.setattr("tests.support.fake_cluster.line", lambda kind, what: b"x" * 30_000)
    watching = asyncio.ensure_future(anext(frontend.watch("")))
    await until(lambda: cluster.calls.count(("list", "pods")) > 1)
    watching.cancel()


async def test_a_card_that_cannot_be_believed_harms_nobody(
    cluster: Cluster, worker: KubernetesDiscovery, frontend: KubernetesDiscovery
) -> None:
    owner = CardOwner("p", cluster.objects["pods", "ns", "p"]["metadata"]["uid"])
    good = card_object("m", "workers/x", b"1", owner)
    bad = {
        "no-spec": {key: value for key, value in good.items() if key != "spec"},
        "no-key": good | {"spec": {"value": "MQ=="}},
        "no-base64": good | {"spec": {"key": "workers/x", "value": "%%%"}},
        "other-name": good,
        "odd-owners": good | {"metadata": {"labels": good["metadata"]["labels"], "ownerReferences": "me"}},
        "long": good | {"spec": {"key": "k", "value": base64.b64encode(bytes(400 << 10)).decode()}},
    }
    for name, content in bad.items():
        cluster.put("meshcards", "ns", content | {"metadata": good["metadata"] | {"name": name}})
    await worker.put("workers/a", b"1")
    changes = frontend.watch("workers/")
    assert await take(changes) == [Put("workers/a", b"1")]
    reasons = dict(frontend.where().ignored)
    assert set(reasons) == {f"meshcards/{name}" for name in bad}
    assert "base64" in reasons["meshcards/no-base64"] or "ase64" in reasons["meshcards/no-base64"]
    assert "made it by hand" in reasons["meshcards/other-name"]


async def test_a_token_that_is_no_header_is_one_error(
    cluster: Cluster, frontend: KubernetesDiscovery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_follow, "START_TIMEOUT_S", 0.2)
    (tmp_path / "token").write_text("two\nlines")
    with pytest.raises(UnreachableError, match="no Kubernetes API server answers"):
        await anext(frontend.watch(""))


async def test_a_crash_of_a_follower_ends_the_watches(
    cluster: Cluster, worker: KubernetesDiscovery, frontend: KubernetesDiscovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.put("workers/a", b"1")
    changes = frontend.watch("")
    await take(changes)
    monkeypatch.setattr(kubernetes_follow, "read_event", lambda line: 1 / 0)
    cluster.put_pod("ns", "p", "m", is_ready=False)
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(changes), PATIENCE_S)


async def test_pods_that_cannot_be_listed_keep_no_card_for_ever(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that went while its watch was cut lapses in time, whatever happens to the pods."""
    monkeypatch.setattr("kvmesh.mesh.discovery.kubernetes.discovery.RETURN_S", 0.5)
    monkeypatch.setattr("kvmesh.mesh.discovery.kubernetes.view.RETURN_S", 0.5)
    reader = cluster.open(tmp_path)
    owner = CardOwner("p", cluster.objects["pods", "ns", "p"]["metadata"]["uid"])
    cluster.put("meshcards", "ns", card_object("m", "workers/b", b"1", owner))
    changes = reader.watch("")
    await take(changes)
    cluster.history.clear()
    cluster.objects.pop(("meshcards", "ns", name_of("m", "workers/b")))
    cluster.refuse = {("list", "pods"): 503}
    cluster.cut()
    assert await take(changes) == [Deleted("workers/b", has_lapsed=True)]
    await reader.close()


# --- leaving ------------------------------------------------------------------------------------------


async def test_closing_withdraws_all_cards(cluster: Cluster, frontend: KubernetesDiscovery, tmp_path: Path) -> None:
    worker = cluster.open(tmp_path, "p")
    await worker.put("workers/a", b"1")
    await worker.put("workers/b", b"1")
    changes = frontend.watch("workers/")
    await take(changes, 2)
    await worker.close()
    assert {(change.key, change) for change in await take(changes, 2)} == {
        ("workers/a", Deleted("workers/a")),
        ("workers/b", Deleted("workers/b")),
    }
    assert cluster.cards() == []


async def test_closing_does_not_wait_for_a_server_that_is_away(cluster: Cluster, tmp_path: Path) -> None:
    worker = cluster.open(tmp_path, "p")
    await worker.put("workers/a", b"1")
    await cluster.stop()
    await asyncio.wait_for(worker.close(), PATIENCE_S)


async def test_a_process_that_crashed_leaves_no_card_when_its_container_starts_again(
    cluster: Cluster, frontend: KubernetesDiscovery, worker: KubernetesDiscovery
) -> None:
    uid = cluster.objects["pods", "ns", "p"]["metadata"]["uid"]
    cluster.put("meshcards", "ns", card_object("m", "workers/old", b"1", CardOwner("p", uid, "", "run-before")))
    changes = frontend.watch("workers/")
    assert await take(changes) == [Put("workers/old", b"1")]
    await worker.put("workers/new", b"1")
    assert set(await take(changes, 2)) == {Put("workers/new", b"1"), Deleted("workers/old")}
    await until(lambda: keys(cluster) == ["workers/new"])


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("NS/m?api=http://x", "'NS' is no namespace"),
        ("ns/a b?api=http://x", "no mesh 'a b'"),
        ("ns/m?api=x", "no API server at 'x'"),
        ("ns/m?api=http://x&colour=red", "unknown option of kubernetes: colour"),
        ("ns/m?api=http://x&token-file=/nonexistent", "/nonexistent cannot be read"),
        ("ns/m", "there is no Kubernetes here"),
        ("/m?api=http://x", "no namespace in /var/run"),
    ],
)
def test_bad_settings_are_refused(rest: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=said):
        open_discovery(f"kubernetes:{rest}")


def test_a_pod_needs_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "namespace").write_text("prod\n")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setattr("kvmesh.mesh.discovery.kubernetes.discovery.ACCOUNT_FOLDER", str(tmp_path))
    settings = read_settings("/")
    assert (settings.account.url, settings.account.namespace, settings.mesh) == (
        "https://[fd00::1]:443",
        "prod",
        "kvmesh",
    )


async def test_a_process_in_no_pod_may_watch_and_not_join(cluster: Cluster, tmp_path: Path) -> None:
    outside = cluster.open(tmp_path)
    with pytest.raises(ConfigError, match="KVMESH_POD_NAME and KVMESH_POD_UID are not set"):
        await outside.put("workers/a", b"1")
    await outside.close()


async def test_a_pod_without_the_label_may_not_join(cluster: Cluster, tmp_path: Path) -> None:
    cluster.put_pod("ns", "stray")
    stray = cluster.open(tmp_path, "stray")
    with pytest.raises(ConfigError, match=r"the pod stray has no label kvmesh.dev/mesh, so that nobody"):
        await stray.put("workers/a", b"1")
    await stray.close()


async def test_a_pod_that_is_another_may_not_join(cluster: Cluster, tmp_path: Path) -> None:
    one = cluster.open(tmp_path, "p", POD_UID="uid-of-before")
    with pytest.raises(ConfigError, match="not uid-of-before"):
        await one.put("workers/a", b"1")
    await one.close()


@pytest.mark.parametrize(("verb", "plural"), [("list", "pods"), ("list", "meshcards")])
async def test_a_refused_list_names_verb_resource_and_namespace(
    cluster: Cluster, frontend: KubernetesDiscovery, verb: str, plural: str
) -> None:
    cluster.refuse[verb, plural] = 403
    with pytest.raises(ConfigError, match=rf"may not {verb} {plural}\S* in the namespace ns"):
        await anext(frontend.watch(""))


async def test_a_server_that_starts_is_not_believed_when_it_refuses(
    cluster: Cluster, frontend: KubernetesDiscovery, worker: KubernetesDiscovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_follow, "BELIEVED_S", PATIENCE_S)
    await worker.put("workers/a", b"1")
    cluster.refuse["list", "pods"] = 403
    watching = asyncio.ensure_future(anext(frontend.watch("")))
    await until(lambda: cluster.calls.count(("list", "pods")) > 1)
    cluster.refuse.clear()
    assert await asyncio.wait_for(watching, PATIENCE_S) == Put("workers/a", b"1")


async def test_a_refused_write_is_an_error_of_its_caller(cluster: Cluster, worker: KubernetesDiscovery) -> None:
    cluster.refuse["patch", "meshcards"] = 403
    with pytest.raises(ConfigError, match=r"may not patch meshcards.kvmesh.dev in the namespace ns"):
        await worker.put("workers/a", b"1")


async def test_rights_that_are_taken_away_cost_nobody_his_place(
    cluster: Cluster, worker: KubernetesDiscovery, frontend: KubernetesDiscovery, caplog: pytest.LogCaptureFixture
) -> None:
    await worker.put("workers/a", b"1")
    changes = frontend.watch("")
    await take(changes)
    cluster.refuse = {("patch", "meshcards"): 403, ("list", "pods"): 403, ("watch", "pods"): 403}
    cluster.cut()
    await asyncio.wait_for(worker.put("workers/a", b"2"), PATIENCE_S)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(changes), 1.0)
    assert "tried again" in caplog.text
    cluster.refuse = {}
    await until(lambda: base64.b64decode(cluster.cards()[0]["spec"]["value"]) == b"2")


async def test_a_cluster_without_the_custom_resource_says_so(cluster: Cluster, frontend: KubernetesDiscovery) -> None:
    cluster.is_installed = False
    with pytest.raises(ConfigError, match=r"knows no meshcards: .*; install deploy/helm/kvmesh/crds"):
        await anext(frontend.watch(""))


async def test_a_card_that_is_too_large_is_refused(worker: KubernetesDiscovery) -> None:
    with pytest.raises(ConfigError, match="has 400000 bytes"):
        await worker.put("workers/a", bytes(400_000))


async def test_nobody_at_the_address_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_follow, "START_TIMEOUT_S", 0.2)
    nobody = Cluster(url="http://127.0.0.1:1").open(tmp_path)
    with pytest.raises(UnreachableError, match=r"no Kubernetes API server answers: list .* cannot connect"):
        await anext(nobody.watch(""))
    await nobody.close()


async def test_a_renewed_token_is_read_again(cluster: Cluster, worker: KubernetesDiscovery, tmp_path: Path) -> None:
    await worker.put("workers/a", b"1")
    cluster.token = "another"
    (tmp_path / "token").write_text("another")
    await worker.put("workers/a", b"2")
    assert base64.b64decode(cluster.cards()[0]["spec"]["value"]) == b"2"


async def test_two_pods_with_one_key_are_reported(
    cluster: Cluster, worker: KubernetesDiscovery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.put_pod("ns", "q", "m")
    other = cluster.open(tmp_path, "q")
    await worker.put("routers/r", b"1")
    await take(worker.watch("routers/"))
    await other.put("routers/r", b"2")
    await until(lambda: "pod q has written the card routers/r too" in caplog.text)
    assert cluster.writes() == 2
    await other.close()


def test_the_account_is_read_from_the_token() -> None:
    claims = base64.urlsafe_b64encode(msgspec.json.encode({"sub": "system:serviceaccount:ns:w"})).decode().rstrip("=")
    assert subject_of(f"x.{claims}.y") == "system:serviceaccount:ns:w"
    assert [subject_of(token) for token in ("", "x", "x.y.z", "a.%%.c", "x.W10.y")] == [""] * 5
