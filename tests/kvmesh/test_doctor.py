"""The doctor judges a machine by its facts, and ends on this one."""

import asyncio
import io
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from rich.console import Console

from kvmesh.commands import doctor
from kvmesh.commands.doctor import Finding, TorchProbe
from kvmesh.commands.nixl_probe import NixlProbe
from kvmesh.mesh.discovery import open_discovery, standing_calls
from kvmesh.mesh.plane.server import PlaneServer
from kvmesh.protocol.messages import RouterCard, encode_card
from kvmesh.protocol.version import PROTOCOL_VERSION, RELEASE
from tests.support.etcd_server import WHY_NONE, EtcdProcess
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

GPU = "NVIDIA H200, 143771 MiB, 570.1"
CPU_TORCH = TorchProbe("2.13.0+cpu")


def test_this_machine_is_examined(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = doctor.main(["--json", "--discovery", f"file:{tmp_path / 'discovery'}"])
    report = msgspec.json.decode(capsys.readouterr().out)
    by_name = {finding["name"]: finding for finding in report["findings"]}
    assert by_name["Python"]["status"] == "ok"
    assert by_name["KV transfer"]["status"] == "ok"
    assert code == (0 if report["ok"] else 1)
    assert not list(tmp_path.iterdir()), "the doctor left something behind"


def test_every_finding_that_is_not_ok_says_what_to_do() -> None:
    for finding in [
        doctor.check_python((3, 10, 2)),
        doctor.check_packages(["no-such-distribution"]),
        doctor.check_packages(None),
        doctor.check_uvloop(""),
        doctor.check_torch(TorchProbe("")),
        doctor.check_torch(TorchProbe("2.13.0", problem="OSError: libcudart.so.12")),
        doctor.check_gpu([GPU], CPU_TORCH),
        doctor.check_gpu([GPU], TorchProbe("2.13.0", cuda="12.9")),
        doctor.check_nixl(NixlProbe("ModuleNotFoundError: nixl")),
        doctor.check_shared_memory("Operation not permitted", 0),
        doctor.check_shared_memory("", 64 * 2**20),
        doctor.check_kv_transfer(nixl_works=False, shm_works=False),
        doctor.check_discovery("consul://localhost"),
        doctor.check_discovery("etcd:"),
        doctor.check_capacity(2, 2**29),
    ]:
        assert finding.status != "ok", finding
        assert finding.advice, finding


def test_shared_storage_is_tried(tmp_path: Path) -> None:
    finding = doctor.check_shared_storage(f"dir:{tmp_path / 'kv'}")
    assert finding.status == "ok"
    assert not [path for path in (tmp_path / "kv").rglob("*") if path.is_file()], "the doctor left something behind"
    (tmp_path / "file").write_text("")
    assert "cannot be opened" in doctor.check_shared_storage(f"dir:{tmp_path / 'file'}").found
    assert doctor.check_shared_storage("nfs:x").status == "warn"


def test_a_missing_package_is_named() -> None:
    finding = doctor.check_packages(["msgspec", "no-such-distribution"])
    assert (finding.status, finding.found) == ("fail", "missing: no-such-distribution")


def test_a_gpu_that_torch_cannot_use_leads_to_advice() -> None:
    assert "TORCH=cuda" in doctor.check_gpu([GPU], CPU_TORCH).advice
    assert doctor.check_gpu([GPU], TorchProbe("2.13.0", cuda="12.9", gpus=1)).status == "ok"


def test_no_gpu_is_no_fault() -> None:
    assert doctor.check_gpu([], CPU_TORCH).status == "ok"


def test_the_dtype_that_auto_takes_is_said_with_its_reason() -> None:
    assert "the CPU has amx_bf16" in doctor.check_dtype("amx_bf16").found
    assert "auto is float32" in doctor.check_dtype("").found


def test_without_nixl_shared_memory_moves_the_kv() -> None:
    assert doctor.check_kv_transfer(nixl_works=False, shm_works=True).found.startswith("through shared memory")
    assert doctor.check_kv_transfer(nixl_works=True, shm_works=False).found == "over NIXL"


def test_the_nixl_backends_that_start_are_named() -> None:
    finding = doctor.check_nixl(NixlProbe("", "1.5.1", usable=("POSIX", "UCX"), unusable=("GDS",)))
    assert finding.found == "1.5.1, starts POSIX, UCX; cannot start here: GDS"


def test_a_port_in_use_leads_to_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = doctor.check_port("127.0.0.1", port)
    assert finding.status == "warn"
    assert finding.found.startswith("taken")
    assert f"--port {port + 1}" in finding.advice


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    assert "cannot be had on 192.0.2.1" in doctor.check_port("192.0.2.1", 8000).found


def test_a_discovery_directory_is_tried_but_not_made(tmp_path: Path) -> None:
    assert doctor.check_discovery(f"file:{tmp_path}/a/b").status == "ok"
    assert not list(tmp_path.iterdir())


def test_a_discovery_directory_that_cannot_be_written_fails() -> None:
    finding = doctor.check_discovery("file:/proc/kvmesh")  # where not even root can write
    assert (finding.status, finding.found.partition(":")[0]) == ("fail", "cannot write to /proc")


def test_a_discovery_server_is_tried_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.mesh.discovery.etcd.discovery.START_TIMEOUT_S", 0.2)
    finding = doctor.check_discovery(f"etcd:127.0.0.1:{free_port()}")
    assert (finding.status, finding.found.partition(":")[0]) == ("fail", "no etcd answers at 127.0.0.1")
    if WHY_NONE:
        pytest.skip(WHY_NONE)
    etcd = EtcdProcess(tmp_path)
    try:
        assert doctor.check_discovery(f"etcd:{etcd.endpoint}/site").status == "ok"
        assert etcd.ctl("get", "", "--prefix", "--keys-only").strip() == ""
    finally:
        etcd.stop()


def test_each_address_of_a_list_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "mesh.txt"
    url = f"static:{path}"
    assert (missing := doctor.check_discovery(url)).status == "fail" and "cannot be read" in missing.found
    path.write_text("nonsense\n")
    assert "line 1: 'nonsense' is no address" in doctor.check_discovery(url).found
    path.write_text(away := f"127.0.0.1:{free_port()}")
    finding = doctor.check_discovery(url)
    assert finding.status == "warn"
    assert f"0 of 1 addresses of {url} answer; {away}: cannot connect" in finding.found
    with listening_service(path) as address:
        path.write_text(address)
        assert doctor.check_discovery(url) == Finding("discovery", "ok", f"1 of 1 addresses of {url} answer")
        assert doctor.check_versions(url).found.endswith(f"registered services: 1 of kvmesh {RELEASE}")


@contextmanager
def listening_service(path: Path) -> Iterator[str]:
    """Run a service in a thread: the doctor runs event loops of its own."""
    started, stop = Future[str](), asyncio.Event()

    async def serve() -> None:
        store = open_discovery(f"static:{path}")
        server = PlaneServer({}, standing=standing_calls(store))
        address = await server.start("127.0.0.1")
        await store.put("routers/r", encode_card(RouterCard(name="r")))
        started.set_result(address)
        await stop.wait()
        await store.close()
        await server.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield started.result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_services_of_far_releases_are_named(tmp_path: Path) -> None:
    ours = f"kvmesh {RELEASE}, protocol {PROTOCOL_VERSION}"
    assert doctor.check_versions(f"file:{tmp_path / 'none'}").found == f"{ours}; registered services: none"
    write_card(tmp_path, "workers/old", {})
    write_card(tmp_path, "routers/new", {"protocol": PROTOCOL_VERSION, "oldest_protocol": 1, "release": RELEASE})
    finding = doctor.check_versions(f"file:{tmp_path}")
    assert finding == Finding("versions", "ok", f"{ours}; registered services: 1 of kvmesh 0.1, 1 of kvmesh {RELEASE}")
    write_card(tmp_path, "workers/far", {"protocol": 99, "oldest_protocol": 98, "release": "9.9.9"})
    write_card(tmp_path, "servers/s", {"protocol": 99, "oldest_protocol": 98})  # no card
    finding = doctor.check_versions(f"file:{tmp_path}")
    assert (finding.status, finding.advice) == ("warn", "run releases together that are next to each other")
    assert "workers/far: it speaks protocol 99" in finding.found and "servers/s" not in finding.found


def write_card(folder: Path, key: str, fields: dict[str, object]) -> None:
    (folder / f"{quote(key, safe='')}.key").write_bytes(msgspec.msgpack.encode(fields))


def test_engines_are_found_without_being_imported() -> None:
    finding = doctor.check_engines({"msgspec": ("no-such-distribution", "msgspec"), "no_such_engine": ("x",)})
    assert finding.found == f"msgspec {msgspec.__version__}, mock; not installed: no_such_engine"


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_only_a_failed_check_changes_the_exit_code(
    status: doctor.Status, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda config: [Finding("thing", status, "[found]", "[do this]")])
    assert doctor.main([]) == code
    assert "[found]" in capsys.readouterr().out


def test_the_table_shows_name_and_advice() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    doctor.show([Finding("NIXL", "warn", "no UCX", "make install")], console)
    text = console.export_text()
    assert "warn NIXL no UCX" in " ".join(text.split())
    assert "-> make install" in text
