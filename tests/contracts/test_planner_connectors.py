"""The promises of every connector of the planner, and the further promises of each kind."""

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol, get_args, get_type_hints

import aiohttp
import pytest
import pytest_asyncio

from kvmesh.cluster.control import control_socket
from kvmesh.mesh.discovery.kubernetes.api import Account, account_of
from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.connectors.compose import ComposeConnector
from kvmesh.planner.connectors.connector import Connector, ConnectorError, Fleets
from kvmesh.planner.connectors.dry_run import DryRunConnector
from kvmesh.planner.connectors.kinds import KINDS, open_connector
from kvmesh.planner.connectors.kubernetes.connector import KubernetesConnector, workload_path
from kvmesh.planner.connectors.local import LocalConnector
from kvmesh.planner.connectors.shadow import ShadowConnector
from kvmesh.planner.connectors.virtual import VirtualConnector, read_token
from kvmesh.planner.model import Action, Flip, Reason, RoleFleet, ScalingDecision
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from tests.support import fake_docker
from tests.support.fake_crew import FakeHost
from tests.support.fake_kubernetes import FakeKubernetes, Workload

PREFILL, DECODE = 2, 3  # workers that every world begins with, all ready


def decision(prefill: int, decode: int, flip: Flip | None = None) -> ScalingDecision:
    return ScalingDecision(
        at_s=0.0,
        loop="reactive",
        action=Action.SCALE,
        prefill=prefill,
        decode=decode,
        flip=flip,
        reasons=(Reason(code="test", text="a test wants it"),),
    )


class World(Protocol):
    """The fleet that a connector acts on. `can_flip`: it changes roles; `acts`: it changes anything."""

    connector: Connector
    can_flip: bool
    acts: bool

    async def start(self, cleanup: AsyncExitStack) -> None: ...

    async def carry_out(self) -> None:
        """Carry out pending orders now. Workers that start are not ready by that."""

    async def all_ready(self) -> None:
        """Make all starting workers ready."""

    async def ordered(self) -> tuple[int, int]:
        """Return the workers that really exist, ready or starting."""

    def break_down(self) -> None:
        """Let orders fail from now on."""

    def mend(self) -> None:
        """Let orders succeed again."""


class LocalWorld:
    can_flip, acts = True, True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.host = FakeHost()

    async def start(self, cleanup: AsyncExitStack) -> None:
        await self.host.start(PREFILL, DECODE)
        cleanup.push_async_callback(self.host.close)
        control = await cleanup.enter_async_context(control_socket(self.host.crew, self._folder))
        self._path = Path(control.removeprefix("unix:"))
        self.connector: Connector = LocalConnector(control)

    async def carry_out(self) -> None:
        await self.host.heard()

    async def all_ready(self) -> None:
        await self.host.all_ready()

    async def ordered(self) -> tuple[int, int]:
        roles = list(self.host.roles().values())
        return roles.count(Role.PREFILL), roles.count(Role.DECODE)

    def break_down(self) -> None:
        self._path.rename(self._path.with_suffix(".away"))

    def mend(self) -> None:
        self._path.with_suffix(".away").rename(self._path)


class ComposeWorld:
    can_flip, acts = False, True

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._state = folder / "docker.json"
        monkeypatch.setenv("FAKE_DOCKER_STATE", str(self._state))
        containers = [{"Service": "p", "State": "running", "Health": "healthy"} for _ in range(PREFILL)]
        containers += [{"Service": "d", "State": "running", "Health": ""} for _ in range(DECODE)]
        self.save({"containers": containers, "fail": "", "calls": []})
        docker = f"{sys.executable} {fake_docker.__file__}"
        self.connector: Connector = ComposeConnector(
            f"{docker} compose", ["a.yml", "b.yml"], "mesh", prefill="p", decode="d", inspect=f"{docker} inspect"
        )

    def load(self) -> dict:
        return json.loads(self._state.read_text())

    def save(self, state: dict) -> None:
        self._state.write_text(json.dumps(state))

    async def start(self, cleanup: AsyncExitStack) -> None:
        pass

    async def carry_out(self) -> None:
        pass

    async def all_ready(self) -> None:
        state = self.load()
        for container in state["containers"]:
            container["Health"] = "healthy"
        self.save(state)

    async def ordered(self) -> tuple[int, int]:
        services = [container["Service"] for container in self.load()["containers"]]
        return services.count("p"), services.count("d")

    def break_down(self) -> None:
        self.save(self.load() | {"fail": "Cannot connect to the Docker daemon"})

    def mend(self) -> None:
        self.save(self.load() | {"fail": ""})


class KubernetesWorld:
    can_flip, acts = False, True

    def __init__(self, folder: Path) -> None:
        self.paths = [workload_path(name, "ns") for name in ("deployment/p", "leaderworkerset/d")]
        counts = zip(self.paths, (PREFILL, DECODE), strict=True)
        self.server = FakeKubernetes(workloads={path: Workload(count, count) for path, count in counts})
        self._token = folder / "token"
        self._token.write_text(self.server.token + "\n")

    async def start(self, cleanup: AsyncExitStack) -> None:
        await cleanup.enter_async_context(self.server.running())
        account = Account(self.server.url, "ns", self._token, None)
        self.connector: Connector = KubernetesConnector(account, prefill="deployment/p", decode="leaderworkerset/d")

    async def carry_out(self) -> None:
        pass

    async def all_ready(self) -> None:
        for workload in self.server.workloads.values():
            workload.ready, workload.going = workload.replicas, 0

    async def ordered(self) -> tuple[int, int]:
        prefill, decode = (self.server.workloads[path].replicas for path in self.paths)
        return prefill, decode

    def break_down(self) -> None:
        self.server.refuse_with = 503

    def mend(self) -> None:
        self.server.refuse_with = None


class VirtualWorld:
    """An orchestrator that asks over HTTP when the test lets it."""

    can_flip, acts = False, True

    def __init__(self) -> None:
        self.ready = Fleets(prefill=RoleFleet(ready=PREFILL), decode=RoleFleet(ready=DECODE))
        self.has = (PREFILL, DECODE)
        self.now_s = 0.0
        self.is_away = False
        self.last_id = 0
        self.virtual = VirtualConnector(lambda: self.ready, 60.0, "a-long-enough-secret", lambda: self.now_s)
        self.connector: Connector = self.virtual

    async def start(self, cleanup: AsyncExitStack) -> None:
        await self.virtual.start("127.0.0.1", 0)
        headers = {"authorization": "Bearer a-long-enough-secret"}
        self.http = await cleanup.enter_async_context(aiohttp.ClientSession(base_url=self.virtual.url, headers=headers))

    async def carry_out(self) -> None:
        if self.is_away:
            return
        async with self.http.get("/decision", params={"after": self.last_id}) as response:
            if response.status == 204:
                return
            order = await response.json()
        self.has = (order["prefill"], order["decode"])
        self.last_id = order["decision_id"]
        said = {"prefill": order["prefill"], "decode": order["decode"]}
        async with self.http.post(f"/decision/{self.last_id}/acknowledge", json=said) as response:
            assert response.status == 204

    async def all_ready(self) -> None:
        self.ready = Fleets(prefill=RoleFleet(ready=self.has[0]), decode=RoleFleet(ready=self.has[1]))

    async def ordered(self) -> tuple[int, int]:
        return self.has

    def break_down(self) -> None:
        self.is_away = True

    def mend(self) -> None:
        self.is_away = False


class DryWorld:
    can_flip, acts = False, False

    def __init__(self) -> None:
        self.fleets = Fleets(prefill=RoleFleet(ready=PREFILL), decode=RoleFleet(ready=DECODE))
        self.connector: Connector = DryRunConnector(lambda: self.fleets)

    async def start(self, cleanup: AsyncExitStack) -> None:
        pass

    async def carry_out(self) -> None:
        pass

    async def all_ready(self) -> None:
        pass

    async def ordered(self) -> tuple[int, int]:
        return PREFILL, DECODE

    def break_down(self) -> None:
        pass

    def mend(self) -> None:
        pass


class ShadowWorld(DryWorld):
    can_flip, acts = True, True

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.connector = ShadowConnector(DryRunConnector(lambda: self.fleets), lambda: self.now_s, 10.0, 2.0)

    async def all_ready(self) -> None:
        self.now_s += 11

    async def ordered(self) -> tuple[int, int]:
        fleets = await self.connector.fleets()
        return fleets.prefill.ordered, fleets.decode.ordered


WORLDS = [*KINDS, "shadow"]


@pytest_asyncio.fixture(params=WORLDS)
async def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    made: dict[str, Callable[[], World]] = {
        "local": lambda: LocalWorld(tmp_path),
        "compose": lambda: ComposeWorld(tmp_path, monkeypatch),
        "kubernetes": lambda: KubernetesWorld(tmp_path),
        "virtual": VirtualWorld,
        "dry-run": DryWorld,
        "shadow": ShadowWorld,
    }
    world = made[request.param]()
    async with AsyncExitStack() as cleanup:
        await world.start(cleanup)
        yield world
        await world.connector.close()
        await world.connector.close()


# --- all of them --------------------------------------------------------------------------------------


async def test_the_fleets_are_the_present_workers(world: World) -> None:
    fleets = await world.connector.fleets()
    assert (fleets.prefill.ready, fleets.decode.ready) == (PREFILL, DECODE)
    assert (fleets.prefill.ordered, fleets.decode.ordered) == (PREFILL, DECODE)


async def test_more_workers_are_ordered_at_once_and_count_as_starting(world: World) -> None:
    await world.connector.apply(decision(4, 5))
    await world.carry_out()
    if not world.acts:
        assert await world.ordered() == (PREFILL, DECODE)
        return
    assert await world.ordered() == (4, 5)
    fleets = await world.connector.fleets()
    assert (fleets.prefill.ready, fleets.prefill.starting) == (PREFILL, 2)
    assert (fleets.decode.ready, fleets.decode.starting) == (DECODE, 2)
    await world.all_ready()
    fleets = await world.connector.fleets()
    assert (fleets.prefill.ready, fleets.decode.ready) == (4, 5)


async def test_applying_a_decision_again_changes_nothing(world: World) -> None:
    for wanted in (decision(3, 5), decision(1, 2), decision(2, 1, Flip(to_role="prefill", count=1))):
        await world.connector.apply(wanted)
        await world.carry_out()
        before = await world.ordered()
        for _ in range(3):
            await world.connector.apply(wanted)
            await world.carry_out()
        assert await world.ordered() == before
        await world.all_ready()


async def test_surplus_workers_leave_and_no_more(world: World) -> None:
    await world.connector.apply(decision(1, 1))
    await world.carry_out()
    assert await world.ordered() == ((1, 1) if world.acts else (PREFILL, DECODE))


async def test_the_result_says_whether_the_order_is_complete(world: World) -> None:
    applied = await world.connector.apply(decision(2, 4))
    await world.carry_out()
    applied = await world.connector.apply(decision(2, 4))
    assert (applied.prefill, applied.decode) == await world.ordered()
    assert applied.is_complete is world.acts
    if not world.acts:
        assert any("dry-run" in note for note in applied.notes)


async def test_starting_workers_stay_and_a_note_says_so(world: World) -> None:
    await world.connector.apply(decision(2, 6))
    await world.carry_out()
    if not world.acts or isinstance(world, VirtualWorld):  # there the orchestrator sees to it
        return
    applied = await world.connector.apply(decision(2, 3))
    assert await world.ordered() == (2, 6)
    assert (applied.decode, applied.is_complete) == (6, False)
    assert any("still start" in note for note in applied.notes)
    await world.all_ready()
    applied = await world.connector.apply(decision(2, 3))
    await world.carry_out()
    assert applied.is_complete
    assert await world.ordered() == (2, 3)


async def test_the_counts_are_reached_with_or_without_the_flip(world: World) -> None:
    flip = decision(1, 4, Flip(to_role="decode", count=1))
    await world.connector.apply(flip)
    await world.carry_out()
    if not world.acts:
        return
    assert await world.ordered() == (1, 4)


async def test_the_number_of_flips_or_a_refusal_is_reported(world: World) -> None:
    flip = decision(1, 4, Flip(to_role="decode", count=1))
    applied = await world.connector.apply(flip)
    if isinstance(world, VirtualWorld):
        await world.carry_out()
        applied = await world.connector.apply(flip)
    if world.can_flip:
        assert applied.flipped == 1
        assert applied.notes == ()
        return
    assert applied.flipped == 0
    assert any(note.startswith(world.connector.name) for note in applied.notes)


async def test_a_failure_is_raised_and_the_next_try_succeeds(world: World) -> None:
    if isinstance(world, DryWorld):
        pytest.skip("nothing can fail")
    world.break_down()
    with pytest.raises(ConnectorError) as failure:
        await world.connector.apply(decision(3, 3))
        world.now_s += 61  # an orchestrator that asks no more is reported after the timeout
        await world.connector.apply(decision(3, 3))
    assert len(str(failure.value)) > 20
    assert await world.ordered() == (PREFILL, DECODE)
    world.mend()
    await world.connector.apply(decision(3, 3))
    await world.carry_out()
    assert await world.ordered() == (3, 3)
    assert (await world.connector.apply(decision(3, 3))).is_complete


async def test_closing_leaves_the_workers_as_they_are(world: World) -> None:
    await world.connector.close()
    assert await world.ordered() == (PREFILL, DECODE)


def test_the_settings_offer_every_kind_of_connector() -> None:
    names = get_args(get_type_hints(ServiceConfig)["connector"])
    assert set(names) == set(KINDS)


@pytest.mark.parametrize("connector", ["compose", "kubernetes"])
async def test_both_roles_in_one_service_or_workload_are_refused(connector: str) -> None:
    one = "deployment/workers"
    flags = {f"{connector}_prefill": one, f"{connector}_decode": one, "kubernetes_url": "http://k"}
    config = ServiceConfig(**{"connector": connector, "kubernetes_namespace": "ns", **flags})
    with pytest.raises(ConfigError, match=f"--{connector}-prefill and --{connector}-decode"):
        await open_connector(config, lambda: Fleets(prefill=RoleFleet(ready=0), decode=RoleFleet(ready=0)))


# --- local --------------------------------------------------------------------------------------------


async def test_a_worker_that_refuses_a_flip_is_named(tmp_path: Path) -> None:
    async with AsyncExitStack() as cleanup:
        world = LocalWorld(tmp_path)
        await world.start(cleanup)
        cleanup.push_async_callback(world.connector.close)
        world.host.refuses = {"prefill-0", "prefill-1"}
        applied = await world.connector.apply(decision(1, 4, Flip(to_role="decode", count=1)))
        assert applied.flipped == 0
        assert any("prefill-1 refused" in note and "cannot change its role" in note for note in applied.notes)
        assert await world.ordered() == (1, 4), "without the flip"


async def test_aggregated_workers_count_and_scale_as_decode_workers(tmp_path: Path) -> None:
    host = FakeHost()
    await host.start(0, 0, aggregated=2)
    async with AsyncExitStack() as cleanup:
        cleanup.push_async_callback(host.close)
        control = await cleanup.enter_async_context(control_socket(host.crew, tmp_path))
        connector = LocalConnector(control, Role.AGGREGATED)
        cleanup.push_async_callback(connector.close)
        assert await connector.fleets() == Fleets(prefill=RoleFleet(ready=0), decode=RoleFleet(ready=2))
        applied = await connector.apply(decision(0, 3))
        assert (applied.prefill, applied.decode, applied.is_complete) == (0, 3, True)
        assert list(host.roles().values()) == [Role.AGGREGATED] * 3


def test_an_address_that_is_no_control_socket_is_refused() -> None:
    with pytest.raises(ConfigError, match="--local-control"):
        LocalConnector("http://localhost")


# --- compose ------------------------------------------------------------------------------------------


async def test_compose_is_called_with_files_and_only_for_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = ComposeWorld(tmp_path, monkeypatch)
    await world.connector.apply(decision(2, 3))
    calls = world.load()["calls"]
    assert not any("up" in call for call in calls)
    await world.connector.apply(decision(2, 4))
    changes = [call for call in world.load()["calls"] if "up" in call]
    assert changes == [
        ["compose", "-f", "a.yml", "-f", "b.yml", "-p", "mesh", "up", "--detach", "--no-deps", "--no-recreate",
         "--scale=p=2", "--scale=d=4", "p", "d"]
    ]  # fmt: skip


async def test_compose_leaves_prefill_alone_without_prefill_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = ComposeWorld(tmp_path, monkeypatch)
    docker = f"{sys.executable} {fake_docker.__file__}"
    connector = ComposeConnector(f"{docker} compose", [], "", prefill="", decode="d", inspect=f"{docker} inspect")
    assert (await connector.fleets()).prefill == RoleFleet(ready=0)
    applied = await connector.apply(decision(0, 4))
    assert (applied.prefill, applied.decode) == (0, 4)
    assert [call[-2:] for call in world.load()["calls"] if "up" in call] == [["--scale=d=4", "d"]]
    assert await world.ordered() == (PREFILL, 4)


async def test_without_docker_the_error_says_what_to_set() -> None:
    connector = ComposeConnector("/nowhere/docker compose", [], "", prefill="p", decode="d")
    with pytest.raises(ConnectorError, match="--compose-command"):
        await connector.fleets()


async def test_an_unreadable_list_of_containers_is_refused() -> None:
    connector = ComposeConnector("echo c0ffee", [], "", prefill="p", decode="d", inspect="echo {broken")
    with pytest.raises(ConnectorError, match="no list of containers"):
        await connector.fleets()


# --- kubernetes ---------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[KubernetesWorld]:
    async with AsyncExitStack() as cleanup:
        world = KubernetesWorld(tmp_path)
        await world.start(cleanup)
        cleanup.push_async_callback(world.connector.close)
        yield world


async def test_a_conflicting_change_is_tried_again(cluster: KubernetesWorld) -> None:
    cluster.server.conflicts = 2
    await cluster.connector.apply(decision(3, 3))
    assert await cluster.ordered() == (3, 3)


async def test_scaling_up_comes_before_scaling_down(cluster: KubernetesWorld) -> None:
    await cluster.connector.apply(decision(1, 4))
    assert [count for _, count in cluster.server.patches] == [4, 1]


async def test_kubernetes_leaves_prefill_alone_without_prefill_workers(
    cluster: KubernetesWorld, tmp_path: Path
) -> None:
    account = Account(cluster.server.url, "ns", tmp_path / "token", None)
    connector = KubernetesConnector(account, prefill="", decode="leaderworkerset/d")
    assert await connector.fleets() == Fleets(prefill=RoleFleet(ready=0), decode=RoleFleet(ready=DECODE))
    applied = await connector.apply(decision(0, 4))
    await connector.close()
    assert (applied.prefill, applied.decode) == (0, 4)
    assert await cluster.ordered() == (PREFILL, 4)


async def test_a_renewed_token_is_read_again(cluster: KubernetesWorld) -> None:
    await cluster.connector.fleets()
    cluster.server.token = "another"
    with pytest.raises(ConnectorError, match="401"):
        await cluster.connector.fleets()
    cluster._token.write_text("another")
    await cluster.connector.fleets()


async def test_a_missing_right_is_named(cluster: KubernetesWorld) -> None:
    cluster.server.refuse_with = 403
    with pytest.raises(ConnectorError, match="Role"):
        await cluster.connector.apply(decision(3, 3))


async def test_surplus_pods_count_as_draining(cluster: KubernetesWorld) -> None:
    await cluster.connector.apply(decision(2, 1))
    assert (await cluster.connector.fleets()).decode == RoleFleet(ready=1, draining=2)


@pytest.mark.parametrize("workload", ["pod/x", "deployment/", "deployment", "deployment/../x", "deployment/a?b"])
def test_a_name_that_is_no_workload_is_refused(workload: str) -> None:
    with pytest.raises(ConfigError, match="<kind>/<name>"):
        workload_path(workload, "ns")


def test_the_account_comes_from_the_pods_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "namespace").write_text("serving\n")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    account = account_of(str(tmp_path), "", "")
    assert (account.url, account.namespace, account.ca_file) == ("https://10.0.0.1:6443", "serving", None)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(ConfigError, match="no Kubernetes here"):
        account_of(str(tmp_path), "", "")


# --- virtual ------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def orchestrated() -> AsyncIterator[VirtualWorld]:
    async with AsyncExitStack() as cleanup:
        world = VirtualWorld()
        await world.start(cleanup)
        cleanup.push_async_callback(world.connector.close)
        yield world


async def test_decisions_are_numbered_and_served_after_a_number(orchestrated: VirtualWorld) -> None:
    async with orchestrated.http.get("/decision") as response:
        assert response.status == 204
    await orchestrated.connector.apply(decision(3, 4))
    async with orchestrated.http.get("/decision") as response:
        order = await response.json()
    assert order == {"decision_id": 1, "prefill": 3, "decode": 4, "flip": None, "reasons": ["a test wants it"]}
    async with orchestrated.http.get("/decision", params={"after": 1}) as response:
        assert response.status == 204


async def test_a_decision_is_incomplete_until_acknowledged(orchestrated: VirtualWorld) -> None:
    applied = await orchestrated.connector.apply(decision(3, 4))
    assert (applied.is_complete, applied.prefill, applied.decode) == (False, PREFILL, DECODE)
    async with orchestrated.http.post(
        "/decision/1/acknowledge", json={"prefill": 3, "decode": 3, "done": False, "notes": ["no room"]}
    ) as response:
        assert response.status == 204
    applied = await orchestrated.connector.apply(decision(3, 4))
    assert (applied.is_complete, applied.decode, applied.notes) == (False, 3, ("no room",))


@pytest.mark.parametrize(
    ("number", "said", "status"),
    [
        (1, {"prefill": 1, "decode": 4}, 422),  # fewer, and done
        (2, {"prefill": 3, "decode": 4}, 409),  # another decision
        (1, {"prefill": -1, "decode": 4}, 400),
        (1, {"prefill": 3}, 400),
        (1, {"prefill": 3, "decode": 4, "more": 1}, 400),
        (1, {"prefill": 3, "decode": 4, "notes": ["x" * 501]}, 400),
        (1, {"prefill": 3, "decode": 4, "notes": ["x" * 400] * 200}, 413),
    ],
)
async def test_an_impossible_acknowledgement_is_refused(
    orchestrated: VirtualWorld, number: int, said: dict, status: int
) -> None:
    await orchestrated.connector.apply(decision(3, 4))
    async with orchestrated.http.post(f"/decision/{number}/acknowledge", json=said) as response:
        assert response.status == status
    assert not (await orchestrated.connector.apply(decision(3, 4))).is_complete


async def test_a_request_without_the_token_is_refused(orchestrated: VirtualWorld) -> None:
    async with orchestrated.http.get("/decision", headers={"authorization": "Bearer wrong"}) as response:
        assert response.status == 401


def test_a_token_that_is_too_short_or_missing_is_refused(tmp_path: Path) -> None:
    assert read_token("") == ""
    (tmp_path / "token").write_text("short")
    with pytest.raises(ConfigError, match="16"):
        read_token(str(tmp_path / "token"))
    with pytest.raises(ConfigError, match="cannot read"):
        read_token(str(tmp_path / "none"))


# --- shadow -------------------------------------------------------------------------------------------


async def test_a_shadow_never_changes_the_real_fleet() -> None:
    world = ShadowWorld()
    await world.connector.apply(decision(5, 5))
    assert world.fleets == Fleets(prefill=RoleFleet(ready=PREFILL), decode=RoleFleet(ready=DECODE))
    assert (await world.connector.fleets()).prefill == RoleFleet(ready=PREFILL, starting=3)
