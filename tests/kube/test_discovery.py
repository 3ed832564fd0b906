"""Discovery through a real API server: who counts, what survives its faults, what it costs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvmesh.commands.doctor import check_discovery_server
from kvmesh.mesh.discovery import Change, Deleted, Put, open_discovery
from kvmesh.mesh.discovery.kubernetes import list_watch
from kvmesh.mesh.discovery.kubernetes.api import KubernetesApi
from kvmesh.mesh.discovery.kubernetes.discovery import KubernetesDiscovery
from kvmesh.mesh.discovery.kubernetes.follow import CollectionFollower
from kvmesh.mesh.discovery.kubernetes.objects import MeshPod, name_of, read_pod
from kvmesh.protocol.errors import ConfigError, MeshError, UnreachableError
from tests.kube.conftest import Space
from tests.support.patience import PATIENCE_S


async def take(changes: AsyncIterator[Change], count: int = 1) -> list[Change]:
    return [await asyncio.wait_for(anext(changes), PATIENCE_S) for _ in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.05)


async def joined(space: Space, pod: str = "worker-0", key: str = "workers/a") -> KubernetesDiscovery:
    worker = space.open("worker", space.pod(pod))
    await worker.put(key, b"1")
    return worker


# --- who counts ---------------------------------------------------------------------------------------


async def test_a_card_counts_while_its_pod_is_ready(space: Space) -> None:
    worker = space.open("worker", space.pod("worker-0", is_ready=False))
    frontend = space.open("frontend")
    await worker.put("workers/a", b"1")
    changes = frontend.watch("workers/")
    first = asyncio.ensure_future(anext(changes))
    await until(lambda: frontend.where().ignored == (("workers/a", "its pod worker-0 is not ready"),))
    assert not first.done()
    space.set_ready("worker-0", True)
    assert await asyncio.wait_for(first, PATIENCE_S) == Put("workers/a", b"1")
    assert frontend.where().ignored == ()
    space.set_ready("worker-0", False)
    assert await take(changes) == [Deleted("workers/a", has_lapsed=True)]
    space.set_ready("worker-0", True)
    assert await take(changes) == [Put("workers/a", b"1")]


async def test_a_pod_that_is_being_deleted_leaves_at_once(space: Space) -> None:
    worker, frontend = space.open("worker", space.pod("worker-0", node="node-1")), space.open("frontend")
    await worker.put("workers/a", b"1")
    changes = frontend.watch("workers/")
    await take(changes)
    space.server.remove_pod(space.namespace, "worker-0", grace_s=30)
    assert await take(changes) == [Deleted("workers/a")]
    assert frontend.where().ignored == (("workers/a", "its pod worker-0 is being deleted"),)


async def test_a_card_does_not_count_without_its_pod(space: Space) -> None:
    """The card itself is deleted by a controller, which does not run here."""
    await joined(space)
    frontend = space.open("frontend")
    changes = frontend.watch("workers/")
    await take(changes)
    space.server.remove_pod(space.namespace, "worker-0")
    assert await take(changes) == [Deleted("workers/a")]
    await until(lambda: "gone" in str(frontend.where().ignored))
    [(key, reason)] = frontend.where().ignored
    assert (key, reason) == (
        "workers/a",
        "its pod worker-0 is gone, or has not the label kvmesh.dev/mesh=demo",
    )
    [card] = space.server.ask("GET", space.cards)["items"]
    [owner] = card["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Pod", "worker-0")


async def test_a_pod_of_the_same_name_is_another_owner(space: Space) -> None:
    await joined(space)
    space.server.remove_pod(space.namespace, "worker-0")
    space.pod("worker-0")
    frontend = space.open("frontend")
    changes = frontend.watch("workers/")
    first = asyncio.ensure_future(anext(changes))
    await until(lambda: len(frontend.where().ignored) == 2)
    assert not first.done()
    assert dict(frontend.where().ignored)["pods/worker-0"] == "is ready and has put no card"
    first.cancel()


async def test_a_card_that_somebody_takes_away_is_put_again(space: Space) -> None:
    await joined(space)
    space.server.ask("DELETE", f"{space.cards}/{name_of(space.mesh, 'workers/a')}")
    await until(lambda: len(space.server.ask("GET", space.cards)["items"]) == 1)


async def test_kubectl_shows_whose_cards_there_are(space: Space) -> None:
    await joined(space)
    accept = "application/json;as=Table;v=v1;g=meta.k8s.io"
    table = space.server.ask("GET", space.cards, accept=accept)
    [row] = table["rows"]
    shown = dict(zip((column["name"] for column in table["columnDefinitions"]), row["cells"], strict=True))
    assert (shown["Mesh"], shown["Key"], shown["Pod"]) == ("demo", "workers/a", "worker-0")


async def test_many_cards_come_in_pages(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.mesh.discovery.kubernetes.follow.PAGE_OBJECTS", 2)
    worker = space.open("worker", space.pod("worker-0"))
    for number in range(7):
        await worker.put(f"workers/{number}", b"1")
    seen = {change.key for change in await take(space.open("frontend").watch("workers/"), 7)}
    assert seen == {f"workers/{number}" for number in range(7)}


# --- faults -------------------------------------------------------------------------------------------


async def test_the_view_outlives_a_killed_api_server(space: Space) -> None:
    worker = await joined(space)
    frontend = space.open("frontend")
    changes = frontend.watch("workers/")
    await take(changes)
    news = asyncio.ensure_future(anext(changes))
    space.server.kill()
    await until(lambda: frontend.where().status().startswith("away since"))
    await asyncio.wait_for(worker.put("workers/a", b"2"), PATIENCE_S)  # nobody waits for a server that is away
    await asyncio.sleep(1.0)
    assert not news.done()
    await asyncio.to_thread(space.server.start)
    assert await asyncio.wait_for(news, PATIENCE_S) == Put("workers/a", b"2")
    await until(lambda: frontend.where().status() == "reached")


async def test_a_silent_api_server_costs_nobody_his_place(space: Space) -> None:
    await joined(space)
    frontend = space.open("frontend")
    changes = frontend.watch("workers/")
    await take(changes)
    news = asyncio.ensure_future(anext(changes))
    space.server.pause()
    await asyncio.sleep(6.0)
    assert not news.done()
    space.server.resume()
    space.set_ready("worker-0", False)
    assert await asyncio.wait_for(news, PATIENCE_S) == Deleted("workers/a", has_lapsed=True)


class Pods:
    """Remembers the lists and changes of a follower."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []
        self.changes: list[tuple[str, bool]] = []
        self.away: list[str] = []

    def on_list(self, found: list[MeshPod]) -> None:
        self.lists.append([pod.name for pod in found])

    def on_object(self, found: MeshPod, is_gone: bool) -> None:
        self.changes.append((found.name, is_gone))

    def on_away(self, error: MeshError) -> None:
        self.away.append(error.message)


@asynccontextmanager
async def following_pods(space: Space, revision: str = "") -> AsyncIterator[tuple[CollectionFollower[MeshPod], Pods]]:
    """Follow the pods of the mesh, from a revision if one is given."""
    api, pods = KubernetesApi(space.account("frontend")), Pods()
    path = f"api/v1/namespaces/{space.namespace}/pods"
    follower = CollectionFollower(api, path, "pods", "kvmesh.dev/mesh=demo", read_pod, pods)
    if revision:
        follower.steps.on_page(revision, "")
    following = asyncio.create_task(follower.run())
    try:
        yield follower, pods
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await api.close()


async def test_a_forgotten_revision_lists_again(space: Space) -> None:
    """The API server answers a watch from a revision before etcd's compaction with 410."""
    space.pod("worker-0")
    space.server.etcd.compact()
    async with following_pods(space, "1") as (_, pods):
        await until(lambda: pods.lists == [["worker-0"]])
        assert space.server.requests(space.user("frontend")) == [("watch", "pods"), ("list", "pods")]
        assert pods.away == []


async def test_bookmarks_carry_a_quiet_watch_on(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends each watch after some seconds here. What others write would make our revision too old."""
    monkeypatch.setattr(list_watch, "WATCH_S", 5.0)
    space.pod("worker-0")
    async with following_pods(space) as (follower, pods):
        await until(lambda: pods.lists == [["worker-0"]])
        listed = follower.steps.revision
        for number in range(4):
            space.server.add_pod(space.namespace, f"other-{number}", {})
            space.server.etcd.compact()
        await until(lambda: follower.steps.revision != listed)
        await until(lambda: space.server.requests(space.user("frontend")).count(("watch", "pods")) >= 2)
        space.set_ready("worker-0", False)
        await until(lambda: pods.changes == [("worker-0", False)])
        assert (len(pods.lists), pods.away) == (1, [])


# --- what is refused ----------------------------------------------------------------------------------


async def test_missing_rights_are_named(space: Space) -> None:
    """A worker may not follow pods."""
    with pytest.raises(ConfigError) as refused:
        await anext(space.open("worker").watch("workers/"))
    who = f"system:serviceaccount:{space.namespace}:demo-worker"
    assert f"{who} may not list pods in the namespace {space.namespace}" in str(refused.value)


async def test_a_missing_right_to_write_is_named(space: Space) -> None:
    role = f"apis/rbac.authorization.k8s.io/v1/namespaces/{space.namespace}/roles/demo-worker"
    rules = [{"apiGroups": ["kvmesh.dev"], "resources": ["meshcards"], "verbs": ["list", "watch"]}]
    rules += [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]
    space.server.ask("PATCH", role, {"rules": rules}, body_type="application/merge-patch+json")
    worker = space.open("worker", space.pod("worker-0"))
    with pytest.raises(ConfigError, match=r"demo-worker may not patch meshcards.kvmesh.dev in the namespace test-\d+"):
        await worker.put("workers/a", b"1")


async def test_a_namespace_that_is_not_ours_is_refused(space: Space) -> None:
    url = space.url("frontend").replace(f"kubernetes:{space.namespace}/", "kubernetes:default/")
    discovery = open_discovery(url)
    with pytest.raises(ConfigError, match="may not list pods in the namespace default"):
        await anext(discovery.watch(""))
    await discovery.close()


async def test_a_pod_of_another_mesh_may_not_join(space: Space) -> None:
    uid = space.server.add_pod(space.namespace, "stray", {"kvmesh.dev/mesh": "other"})
    worker = space.open("worker", {"KVMESH_POD_NAME": "stray", "KVMESH_POD_UID": uid})
    with pytest.raises(ConfigError, match=r"the pod stray has the label .*=other, so that nobody in the mesh demo"):
        await worker.put("workers/a", b"1")


async def test_a_token_of_nobody_is_refused(space: Space, tmp_path: Path) -> None:
    url = space.url("frontend")
    (tmp_path / "frontend.token").write_text("nonsense")
    discovery = open_discovery(url)
    with pytest.raises(ConfigError, match=r"does not accept the token of .*frontend.token \(401\)"):
        await anext(discovery.watch(""))
    await discovery.close()


async def test_no_api_server_is_one_error(space: Space) -> None:
    discovery = open_discovery(space.url("frontend").replace(space.server.url, "https://127.0.0.1:1"))
    with pytest.raises(
        UnreachableError, match=r"no Kubernetes API server answers: list .*: cannot connect: Connect call failed"
    ):
        await asyncio.wait_for(anext(discovery.watch("")), PATIENCE_S)
    await discovery.close()


async def test_the_doctor_checks_it(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in space.pod("worker-0").items():
        monkeypatch.setenv(name, value)
    found = await check_discovery_server(space.url("worker"))
    assert (found.status, found.found) == (
        "ok",
        f"kubernetes:{space.namespace}/demo answers and can be written to",
    )
    monkeypatch.setenv("KVMESH_POD_UID", "another")
    found = await check_discovery_server(space.url("worker"))
    assert (found.status, "has the uid" in found.found) == ("fail", True)
