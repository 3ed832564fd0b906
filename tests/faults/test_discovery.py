"""Rubbish in the discovery directory, and the directory itself gone, harm nobody."""

import os
import shutil
from pathlib import Path
from urllib.parse import quote

import msgspec

from kvmesh.protocol.messages import Role, WorkerCard, decode, encode
from tests.faults.conftest import PAIR
from tests.support.mesh import Mesh, until
from tests.support.streams import Stream, check_mock_answer

PROMPT = list(range(100, 150))


def put(mesh: Mesh, key: str, value: bytes) -> Path:
    """Put a key into discovery, as a peer would."""
    path = mesh.run_dir / "discovery" / f"{quote(key, safe='')}.key"
    path.write_bytes(value)
    return path


def log(mesh: Mesh) -> str:
    return (mesh.run_dir / "logs" / "frontend.log").read_text()


def joins(mesh: Mesh) -> int:
    return log(mesh).count("worker joined")


RUBBISH = {
    "workers/not msgpack": b"\xc1",
    "workers/empty": b"",
    "workers/other": b"\x80",
    "workers/long": bytes(10**6),
    "workers/../..": b"x",
    "workers/ü\n": b"x",
    "routers/rubbish": b"x",
    "other/rubbish": b"x",
    "": b"x",
}


def test_what_cannot_be_read_harms_nobody(mesh: Mesh) -> None:
    frontend = mesh.find_frontend()
    directory = mesh.run_dir / "discovery"
    (directory / "lost+found").mkdir()
    (directory / "workers%2Ffolder.key").mkdir()
    (directory / "workers%2Fdangling.key").symlink_to("/nonexistent/file")
    (directory / "workers%2Floop.key").symlink_to("workers%2Floop.key")
    os.mkfifo(directory / "workers%2Fpipe.key")
    (directory / "\udcff%.key").write_bytes(b"x")
    (directory / "notes.txt").write_text("x")
    paths = [put(mesh, key, value) for key, value in RUBBISH.items()]
    before = joins(mesh)
    mesh.until_replaced("decode-1", mesh.kill("decode-1"))  # news that must still get through
    until(lambda: joins(mesh) > before, what="the frontend to see the new worker")
    check_mock_answer(Stream(mesh.url, PROMPT, 5, kvmesh={"worker": "decode-1"}).join())
    assert mesh.find_frontend() == frontend
    for path in [*paths, *directory.glob("*")]:
        if path.is_dir():
            path.rmdir()
        elif path in paths or path.name.endswith(".txt") or path.is_symlink() or path.is_fifo():
            path.unlink(missing_ok=True)


def test_a_card_with_an_endpoint_that_is_none_harms_nobody(mesh: Mesh) -> None:
    frontend, joined = mesh.find_frontend(), joins(mesh)
    good = mesh.workers()["decode-0"]
    bad = msgspec.structs.replace(good, worker_id="bad", name="bad", kv_events="nonsense", kv_replay="nonsense")
    path = put(mesh, "workers/bad", encode(bad))
    until(lambda: joins(mesh) > joined, what="the frontend to see it")
    check_mock_answer(Stream(mesh.url, PROMPT, 5).join())
    path.unlink()
    until(lambda: "worker left worker=bad" in log(mesh))
    assert mesh.find_frontend() == frontend


def test_an_absent_worker_costs_a_request_one_try(mesh: Mesh) -> None:
    joined = joins(mesh)
    cards = mesh.workers()
    paths = []
    for role in (Role.PREFILL, Role.DECODE):
        good = cards["prefill-0" if role is Role.PREFILL else "decode-0"]
        bad = msgspec.structs.replace(
            good, worker_id=f"a-{role}", name=f"a-{role}", address="127.0.0.1:1", kv_events=""
        )
        paths.append(put(mesh, f"workers/a-{role}", encode(bad)))
    until(lambda: joins(mesh) >= joined + 2, what="the frontend to see them")
    for i in range(6):
        check_mock_answer(Stream(mesh.url, [i, *PROMPT], 5, kvmesh={"trace": True, "disaggregate": True}).join())
    for path in paths:
        path.unlink()
    until(lambda: log(mesh).count("worker left worker=a-") == 2)


def test_a_removed_run_directory_is_made_again(mesh: Mesh) -> None:
    streams = [Stream(mesh.url, [i, *PROMPT], 100) for i in range(4)]
    for stream in streams:
        stream.until_tokens(3)
    shutil.rmtree(mesh.run_dir / "discovery")
    until(lambda: set(mesh.workers()) == set(PAIR), what="all cards to be there again")
    for stream in streams:
        check_mock_answer(stream.join())
    until(lambda: Stream(mesh.url, PROMPT, 5).join().status == 200, what="a request to be answered")


def test_the_cards_say_who_they_are(mesh: Mesh) -> None:
    for key, value in mesh.entries("workers/").items():
        assert key == f"workers/{decode(value, WorkerCard).worker_id}"
