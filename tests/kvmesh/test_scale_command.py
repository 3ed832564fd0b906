"""`kvmesh scale` and `kvmesh workers` on the machine of the mesh: over its control socket, without a key."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvmesh.cluster.control import control_socket
from kvmesh.commands.local_mesh import find_control
from kvmesh.commands.scale import counts_of, scale
from kvmesh.commands.workers import WorkersConfig, asking, crew
from kvmesh.planner.config import CONTROL_FILE
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from tests.support.fake_crew import FakeHost


@pytest_asyncio.fixture
async def host() -> AsyncIterator[FakeHost]:
    host = FakeHost()
    await host.start(prefill=1, decode=2)
    yield host
    await host.close()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of temporary files: no mesh of another user of this machine is found."""
    monkeypatch.setattr("kvmesh.commands.local_mesh.temporary_parents", lambda: [tmp_path])
    monkeypatch.delenv("KVMESH_API_KEY", raising=False)
    return tmp_path


def run_dir(temporary: Path, name: str) -> Path:
    made = temporary / f"kvmesh-{name}"
    made.mkdir()
    return made


async def test_scale_changes_the_only_mesh_of_this_machine(
    host: FakeHost, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with control_socket(host.crew, run_dir(temporary, "a")):
        control = find_control("")
        assert control is not None
        assert await scale(control, {Role.DECODE: 1, Role.PREFILL: 2}) == 0
    said = capsys.readouterr().out
    assert "decode: 1 worker" in said and "prefill-1 is being started" in said
    assert "decode-1 finishes its requests and ends" in said


async def test_a_worker_that_starts_is_not_taken_away(
    host: FakeHost, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with control_socket(host.crew, temporary) as control:
        path = Path(control.removeprefix("unix:"))
        await scale(path, {Role.DECODE: 3})
        assert await scale(path, {Role.DECODE: 0}) == 1
    assert "decode: 1 worker, 1 too many" in capsys.readouterr().out


async def test_scale_is_refused_where_a_planner_decides(host: FakeHost, temporary: Path) -> None:
    before = host.crew.reports()
    async with control_socket(host.crew, temporary, lambda: True) as control:
        with pytest.raises(ConfigError, match="a planner decides"):
            await scale(Path(control.removeprefix("unix:")), {Role.DECODE: 1})
    assert host.crew.reports() == before


async def test_workers_are_seen_without_a_key(host: FakeHost, temporary: Path) -> None:
    async with control_socket(host.crew, run_dir(temporary, "a")), asking(WorkersConfig()) as (session, url):
        assert {member.name for member in await crew(session, url)} == {"prefill-0", "decode-0", "decode-1"}


async def test_a_key_or_a_url_means_the_api(host: FakeHost, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with control_socket(host.crew, run_dir(temporary, "a")) as control:
        async with asking(WorkersConfig(url="http://elsewhere")) as (_, url):
            assert url == "http://elsewhere"
        monkeypatch.setenv("KVMESH_API_KEY", "sk-admin")
        async with asking(WorkersConfig()) as (_, url):
            assert url == "http://127.0.0.1:8000"
        async with asking(WorkersConfig(control=control)) as (_, url):
            assert url == "http://localhost"


async def test_of_several_meshes_one_has_to_be_named(host: FakeHost, temporary: Path) -> None:
    one, other = run_dir(temporary, "a"), run_dir(temporary, "b")
    async with control_socket(host.crew, one), control_socket(host.crew, other):
        with pytest.raises(ConfigError, match="2 meshes run here; give --control one of"):
            find_control("")
        assert find_control(str(other)) == (other / "control").resolve() / CONTROL_FILE


async def test_a_mesh_of_another_user_is_not_found(
    host: FakeHost, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    async with control_socket(host.crew, run_dir(temporary, "a")):
        assert find_control("") is not None
        monkeypatch.setattr("os.geteuid", lambda: user + 1)
        assert find_control("") is None


def test_a_mesh_that_was_killed_is_not_found(temporary: Path) -> None:
    left = run_dir(temporary, "a") / "control"
    left.mkdir()
    (left / CONTROL_FILE).write_text("")
    assert find_control("") is None


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "write kvmesh scale decode=3"),
        (["decod=3"], "did you mean decode"),
        (["frontend=1"], "role 'frontend'"),
        (["decode=many"], "from 0 to 256"),
        (["decode=257"], "from 0 to 256"),
        (["decode=-1"], "from 0 to 256"),
        (["decode=" + "9" * 5000], "from 0 to 256"),
    ],
)
def test_words_that_are_no_counts_are_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        counts_of(words)


def test_words_become_counts() -> None:
    assert counts_of(["decode=3", "prefill=1"]) == {Role.DECODE: 3, Role.PREFILL: 1}
