"""`kvmesh planner apply`: decisions of a planner elsewhere are carried out by a connector of this host."""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from kvmesh.commands.planner import main
from kvmesh.planner import carry_out as module
from kvmesh.planner.carry_out import RemotePlanner, carry_out
from kvmesh.planner.connectors.compose import ComposeConnector
from kvmesh.planner.connectors.connector import ConnectorError, Fleets
from kvmesh.planner.connectors.virtual import VirtualConnector
from kvmesh.planner.model import Action, RoleFleet, ScalingDecision
from kvmesh.protocol.errors import ConfigError, MeshError
from tests.support import fake_docker
from tests.support.patience import PATIENCE_S

TOKEN = "a-long-enough-secret"


class Containers:
    """Two services of one container each, behind a stand-in for docker."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "docker.json"
        self.save([{"Service": s, "State": "running", "Health": "healthy"} for s in ("prefill", "decode")])
        docker = f"{sys.executable} {fake_docker.__file__}"
        self.connector = ComposeConnector(
            f"{docker} compose", [], "", prefill="prefill", decode="decode", inspect=f"{docker} inspect"
        )

    def save(self, containers: list[dict[str, str]], fail: str = "") -> None:
        self._file.write_text(json.dumps({"containers": containers, "fail": fail, "calls": []}))

    def services(self) -> list[str]:
        return [container["Service"] for container in json.loads(self._file.read_text())["containers"]]


@pytest.fixture
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Containers:
    monkeypatch.setenv("FAKE_DOCKER_STATE", str(tmp_path / "docker.json"))
    return Containers(tmp_path)


@pytest_asyncio.fixture
async def planner() -> AsyncIterator[VirtualConnector]:
    """The planner's end: it has seen one worker of each role."""
    there = Fleets(prefill=RoleFleet(ready=1), decode=RoleFleet(ready=1))
    virtual = VirtualConnector(lambda: there, 60.0, TOKEN)
    await virtual.start("127.0.0.1", 0)
    yield virtual
    await virtual.close()


def decision(prefill: int, decode: int) -> ScalingDecision:
    return ScalingDecision(at_s=0.0, loop="reactive", action=Action.SCALE, prefill=prefill, decode=decode)


@asynccontextmanager
async def hands(planner: VirtualConnector, containers: Containers, token: str = TOKEN) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {token}"}) as http:
        work = asyncio.create_task(carry_out(RemotePlanner(http, planner.url), containers.connector, 0.02, stop))
        yield
        stop.set()
        await work


async def until_complete(planner: VirtualConnector, wanted: ScalingDecision) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not (await planner.apply(wanted)).is_complete:
            await asyncio.sleep(0.02)


async def test_a_decision_becomes_containers_and_is_acknowledged(
    planner: VirtualConnector, containers: Containers
) -> None:
    async with hands(planner, containers):
        await until_complete(planner, decision(1, 3))
        assert containers.services().count("decode") == 3
        fleets = await planner.fleets()
        assert (fleets.decode.ready, fleets.decode.starting) == (1, 2)


async def test_the_command_carries_decisions_out_until_it_is_stopped(
    planner: VirtualConnector, containers: Containers, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    docker = f"{sys.executable} {fake_docker.__file__}"
    flags = ["--url", planner.url, "--token-file", str(tmp_path / "token"), "--poll-s", "0.05"]
    flags += ["--compose-command", f"{docker} compose", "--compose-inspect", f"{docker} inspect"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvmesh", "planner", "apply", *flags)
    await until_complete(planner, decision(2, 3))
    assert sorted(containers.services()) == ["decode"] * 3 + ["prefill"] * 2
    process.terminate()
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0


async def test_what_failed_is_tried_again(
    planner: VirtualConnector, containers: Containers, caplog: pytest.LogCaptureFixture
) -> None:
    there = json.loads(json.dumps([{"Service": s, "State": "running", "Health": ""} for s in ("prefill", "decode")]))
    containers.save(there, fail="Cannot connect to the Docker daemon")
    async with hands(planner, containers):
        await planner.apply(decision(1, 2))
        async with asyncio.timeout(PATIENCE_S):
            while "Cannot connect to the Docker daemon" not in caplog.text:
                await asyncio.sleep(0.01)
        containers.save(there)
        await until_complete(planner, decision(1, 2))
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1, "one line, not one for each try"


async def test_a_planner_that_was_restarted_is_told_again(
    planner: VirtualConnector, containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPEAT_S", 0.05)
    async with hands(planner, containers):
        await until_complete(planner, decision(1, 3))
        planner._order = planner._told = planner._answer = None
        await until_complete(planner, decision(1, 3))


async def test_a_wrong_token_is_said(planner: VirtualConnector) -> None:
    async with aiohttp.ClientSession(headers={"authorization": "Bearer another"}) as http:
        with pytest.raises(MeshError, match=r"answered 401.*--token-file"):
            await RemotePlanner(http, planner.url).order()


async def test_a_planner_that_is_away_is_named() -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(MeshError, match=r"no planner answers at http://127\.0\.0\.1:9"):
            await RemotePlanner(http, "http://127.0.0.1:9").order()


def test_an_address_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="--url"):
        main(["apply", "--url", "127.0.0.1:8090"])


async def test_unknown_containers_are_an_error_and_no_fleet(containers: Containers) -> None:
    containers.save([], fail="no such file: docker-compose.yml")
    with pytest.raises(ConnectorError, match="no such file"):
        await containers.connector.fleets()
