"""The control socket of `kvmesh up`: who may ask, and what is answered."""

import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from kvmesh.cluster.control import control_socket
from kvmesh.cluster.run_folder import let_go
from kvmesh.cluster.running import make_run_dir
from kvmesh.mesh.short_folder import MAX_PATH_BYTES, fits
from tests.support.fake_crew import FakeHost


@pytest_asyncio.fixture
async def host() -> AsyncIterator[FakeHost]:
    host = FakeHost()
    await host.start(prefill=1, decode=2)
    yield host
    await host.close()


def session(control: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(control.removeprefix("unix:")))


@pytest_asyncio.fixture
async def http(host: FakeHost, tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    async with control_socket(host.crew, tmp_path) as control, session(control) as http:
        yield http


async def test_the_workers_are_listed(http: aiohttp.ClientSession) -> None:
    async with http.get("/workers") as response:
        told = await response.json()
    assert [(w["name"], w["role"], w["state"]) for w in told["workers"]] == [
        ("prefill-0", "prefill", "ready"),
        ("decode-0", "decode", "ready"),
        ("decode-1", "decode", "ready"),
    ]
    assert told["failures"] == []


async def test_a_scale_request_reaches_its_counts(host: FakeHost, http: aiohttp.ClientSession) -> None:
    async with http.post("/scale", json={"prefill": 2, "decode": 1}) as response:
        told = await response.json()
    assert told["counts"] == {"prefill": 2, "decode": 1, "aggregated": 0}
    assert (told["started"], told["draining"]) == (["prefill-1"], ["decode-1"])


async def test_a_flip_request_changes_roles(host: FakeHost, http: aiohttp.ClientSession) -> None:
    async with http.post("/flip", json={"to": "prefill"}) as response:
        assert await response.json() == {"flipped": ["decode-1"], "refused": []}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/scale", b"", 400),
        ("/scale", b"[]", 400),
        ("/scale", b'{"decode": -1}', 400),
        ("/scale", b'{"decode": 257}', 400),
        ("/scale", b'{"decode": "3"}', 400),
        ("/scale", b'{"frontend": 1}', 400),
        ("/scale", b'{"decode": 1.5}', 400),
        ("/flip", b'{"to": "aggregated"}', 400),
        ("/flip", b'{"to": "decode", "count": 9999}', 400),
        ("/flip", b"{}", 400),
        ("/scale", b'{"decode": 1' + b" " * 70_000 + b"}", 413),
        ("/workers", b"{}", 405),
        ("/nothing", b"{}", 404),
    ],
)
async def test_a_bad_request_is_refused_and_changes_nothing(
    host: FakeHost, http: aiohttp.ClientSession, path: str, body: bytes, status: int
) -> None:
    before = host.crew.reports()
    async with http.post(path, data=body) as response:
        assert response.status == status
    assert host.crew.reports() == before


async def test_other_users_cannot_reach_the_socket(host: FakeHost, tmp_path: Path) -> None:
    async with control_socket(host.crew, tmp_path) as control:
        folder = Path(control.removeprefix("unix:")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(tmp_path.iterdir()) == []


async def test_a_long_run_directory_has_its_socket_elsewhere(host: FakeHost, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * MAX_PATH_BYTES)
    deep.mkdir()
    async with control_socket(host.crew, deep) as control, session(control) as http:
        async with http.get("/workers") as response:
            assert response.status == 200
        elsewhere = Path(control.removeprefix("unix:")).parent
        assert (deep / "control").resolve() == elsewhere
    assert not elsewhere.exists() and list(deep.iterdir()) == []


async def test_a_long_folder_of_temporary_files_stops_no_mesh(
    host: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * MAX_PATH_BYTES)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    (deep / "control").symlink_to(tmp_path / "gone")  # a mesh that was killed has left it
    async with control_socket(host.crew, deep) as control:
        assert fits(Path(control.removeprefix("unix:")))
    run_dir = make_run_dir("")
    assert fits(run_dir / "control" / "control.sock")
    let_go(run_dir, keep=False)


async def test_the_socket_of_a_killed_mesh_is_replaced(host: FakeHost, tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "control.sock").write_text("left over")
    async with (
        control_socket(host.crew, tmp_path) as control,
        session(control) as http,
        http.get("/workers") as response,
    ):
        assert response.status == 200
