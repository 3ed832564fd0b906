"""Responses as files: what a crash, a full disk and a second frontend do to them."""

import asyncio
import errno
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.responses import directory_store
from kvmesh.frontend.responses.directory_store import LEASE_S, STALE_S, DirectoryStore
from kvmesh.frontend.responses.opening import check, open_store
from kvmesh.frontend.responses.retention import StoreLimits
from kvmesh.frontend.responses.state import KeptResponses
from kvmesh.frontend.responses.store import StorageError, StoredResponse
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Delta
from tests.frontend.responses.serving import ASKED, ids, serving, words


def record(name: str = "a", status: str = "completed") -> StoredResponse:
    shown = {"id": name, "status": status, "error": None, "output": []}
    return StoredResponse(id=name, owner="", status=status, response=json.dumps(shown).encode(), input=b"[]")


def opened(folder: Path, **limits: Any) -> DirectoryStore:
    return DirectoryStore(folder, StoreLimits(**limits))


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


async def test_only_their_user_can_read_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    store = opened(folder)
    await store.put(record())
    [file] = files(folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_a_restart_finds_what_was_stored(tmp_path: Path) -> None:
    await opened(tmp_path).put(record())
    assert await opened(tmp_path).get("", "a") == record()


async def test_a_crash_leaves_no_half_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    await store.put(record())

    def crash(self: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(StorageError, match="Input/output error"):
        await store.put(record(status="incomplete"))
    assert await store.get("", "a") == record()
    assert len(files(tmp_path)) == 1


async def test_what_a_crash_left_is_swept_away(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for name, age_s in [("old.half", STALE_S + 1), ("new.half", 1), ("old.cancel", STALE_S + 1)]:
        (tmp_path / name).write_bytes(b"half")
        then = (tmp_path / name).stat().st_mtime - age_s
        os.utime(tmp_path / name, (then, then))
    (tmp_path / "README").write_text("not ours")
    await store.sweep()
    assert [file.name for file in files(tmp_path)] == ["README", "new.half"]


async def test_an_unreadable_file_is_no_response(tmp_path: Path) -> None:
    store = opened(tmp_path)
    await store.put(record())
    [file] = files(tmp_path)
    for damage in (b"", b"\xff\xff", file.read_bytes()[:-3]):
        file.write_bytes(damage)
        assert await store.get("", "a") is None


async def test_files_are_written_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()

    def fsync(handle: int) -> None:
        assert slow.wait(30)

    store = opened(tmp_path)
    monkeypatch.setattr(os, "fsync", fsync)
    puts = [asyncio.ensure_future(store.put(record(f"{n}"))) for n in range(400)]
    for _ in range(50):
        await asyncio.sleep(0)  # the loop runs on
    assert store._room.locked(), "so many calls wait at a time, and no more"
    slow.set()
    await asyncio.gather(*puts)
    assert len(files(tmp_path)) == 400


async def test_an_unfinished_response_without_its_frontend_has_failed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    await store.put(record(status="in_progress"))
    found = await store.get("", "a")
    assert found is not None and found.status == "in_progress"
    then = files(tmp_path)[0].stat().st_mtime - LEASE_S - 1
    os.utime(files(tmp_path)[0], (then, then))
    found = await opened(tmp_path).get("", "a")
    assert found is not None and found.status == "failed"
    shown = json.loads(found.response)
    assert (shown["status"], shown["error"]["code"]) == ("failed", "server_error")
    await store.beat([("", "a")])
    found = await store.get("", "a")
    assert found is not None and found.status == "in_progress", "it lives after all"


# --- in a frontend ------------------------------------------------------------------------------------


def kept(folder: Path) -> KeptResponses:
    return KeptResponses(opened(folder), 2, is_keyed=False)


def full(record: StoredResponse) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_full_disk_is_reported_and_not_fatal(
    thinking_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(thinking_model, kept(tmp_path)) as served:
        monkeypatch.setattr(directory_store.ResponseFiles, "put", lambda self, record, is_update: full(record))
        body = await served.whole()
        assert "No space left on device" in caplog.text
        assert (await served.events())[-1]["type"] == "response.completed"
        status, _, error = await served.post(ASKED | {"background": True})
        assert (status, error["error"]["code"]) == (503, "storage")
        monkeypatch.undo()
        assert (await served.ask("GET", f"/v1/responses/{body['id']}"))[0] == 404
        await served.whole()
        assert len(files(tmp_path)) == 1


async def test_frontends_share_a_directory(thinking_model: Path, tmp_path: Path) -> None:
    first_kept = kept(tmp_path)
    async with serving(thinking_model, first_kept) as first, serving(thinking_model, kept(tmp_path)) as second:
        body = await first.whole()
        assert (await second.ask("GET", f"/v1/responses/{body['id']}"))[2] == body
        await second.whole(previous_response_id=body["id"], input="Go on.")
        assert "Once upon a time" in second.prompt()


async def test_a_background_response_is_cancelled_by_way_of_another_frontend(
    thinking_model: Path, tmp_path: Path
) -> None:
    first_kept = kept(tmp_path)
    beating = asyncio.create_task(first_kept.run())
    async with serving(thinking_model, first_kept) as first, serving(thinking_model, kept(tmp_path)) as second:
        first.generator.script = [Delta(ids("Once")), asyncio.Event()]
        begun = await first.whole(background=True)
        status, _, body = await second.ask("POST", f"/v1/responses/{begun['id']}/cancel")
        assert (status, body["status"]) == (200, "cancelled")
        assert len(first.generator.cancelled) == 1
    beating.cancel()


async def test_a_background_stream_is_read_by_way_of_another_frontend(thinking_model: Path, tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with serving(thinking_model, kept(tmp_path)) as first, serving(thinking_model, kept(tmp_path)) as second:
        first.generator.script = [gate, *words("Once")]
        streaming = asyncio.ensure_future(first.events(background=True))
        await first.generator.started.wait()
        response_id = first.generator.requests[0].request_id.replace("resp-", "resp_")
        path = f"/v1/responses/{response_id}?stream=true&starting_after=1"
        elsewhere = asyncio.ensure_future(second.ask("GET", path))
        await asyncio.sleep(0)
        gate.set()
        events = await streaming
        status, _, text = await elsewhere
        assert status == 200
        datas = [json.loads(event.partition("data: ")[2]) for event in text.split("\n\n")[:-1]]
        assert datas == events[2:]


# --- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["on", "dir", "dir:", "memory:", "file:x", ""])
def test_an_unknown_store_is_refused_by_name(setting: str) -> None:
    with pytest.raises(ConfigError, match="off, memory or dir:PATH"):
        check(FrontendConfig(responses_store=setting))


def test_processes_that_share_a_port_cannot_store_in_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dir:PATH"):
        check(FrontendConfig(responses_store="memory", processes=2))
    with pytest.raises(ConfigError, match="dir:PATH"):
        check(FrontendConfig(responses_store="memory", shares_port_with=str(tmp_path)))
    check(FrontendConfig(responses_store=f"dir:{tmp_path}", processes=2))


def test_a_directory_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep responses in"):
        open_store(FrontendConfig(responses_store=f"dir:{tmp_path / 'file'}"))


def test_nothing_is_stored_unless_it_is_asked_for() -> None:
    assert open_store(FrontendConfig()) is None
