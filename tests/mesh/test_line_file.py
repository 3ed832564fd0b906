"""Lines go to their file in order, within its size; a full disk costs lines, but never breaks one that follows."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvmesh.mesh.line_file import LineFile
from kvmesh.protocol.errors import ConfigError

# In a process of its own, because it gets a mount namespace.
ON_A_FULL_DISK = """
import asyncio, json, sys
from contextlib import suppress
from pathlib import Path
from kvmesh.lab.faults.room import PrivateRoom
from kvmesh.mesh.line_file import LineFile

folder = Path(sys.argv[1])
if not PrivateRoom(folder).has_disk:
    sys.exit(77)

def line(number):
    return json.dumps({"number": number, "text": "x" * 3000}).encode()

async def main() -> None:
    file = LineFile(folder / "lines", 1 << 30)
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as full:
        while True:
            full.write(bytes(4096))
    with filler.open("r+b") as full:  # room for three lines, and a part of a fourth
        full.truncate(filler.stat().st_size - 3 * 4096)
    for number in range(10):
        file.put(line(number))
    await file.flush()
    print(file.lost)
    filler.unlink()
    file.put(line(10))
    await file.close()
    for text in (folder / "lines").read_text().splitlines():
        try:
            print(json.loads(text)["number"])
        except ValueError:
            print("torn")

asyncio.run(main())
"""


def test_a_full_disk_costs_lines_and_no_later_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    if done.returncode == 77:
        pytest.skip("a small disk needs root")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6", "0", "1", "2", "3", "torn", "10"]
    assert "6 lines for" in done.stderr
    assert "No space left on device" in done.stderr


async def test_lines_keep_their_order_within_two_files_of_the_size(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines", max_bytes=200)
    for number in range(40):
        file.put(json.dumps({"number": number}).encode())
        await file.flush()
    await file.close()
    parts = [(tmp_path / name).read_text().splitlines() for name in ("lines.1", "lines")]
    numbers = [json.loads(line)["number"] for part in parts for line in part]
    assert numbers == list(range(numbers[0], 40))
    assert len(numbers) > 10
    assert all((tmp_path / name).stat().st_size <= 200 for name in ("lines.1", "lines"))


async def test_a_file_that_cannot_be_renamed_goes_on_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lines.1").mkdir()
    (tmp_path / "lines.1" / "other").touch()
    file = LineFile(tmp_path / "lines", max_bytes=20)
    for _ in range(3):
        file.put(b"0123456789abcde")
        await file.flush()
    assert file.lost == 2
    assert caplog.text.count("1 lines for") == 2
    (tmp_path / "lines.1" / "other").unlink()
    (tmp_path / "lines.1").rmdir()
    file.put(b"later")
    await file.close()
    assert (tmp_path / "lines").read_bytes() == b"later\n"


async def test_lines_beyond_what_may_wait_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.mesh.line_file.MAX_WAITING_BYTES", 30)
    file = LineFile(tmp_path / "lines", 1000)
    for _ in range(5):
        file.put(b"0123456789")
    await asyncio.sleep(0)
    await file.close()
    assert file.lost == 3
    assert (tmp_path / "lines").read_bytes() == b"0123456789\n" * 2


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_named_pipe_is_refused_at_once(tmp_path: Path, is_read: bool) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if is_read else None
    try:
        with pytest.raises(ConfigError, match="cannot write"):
            LineFile(path, 1000)
    finally:
        if reader is not None:
            os.close(reader)


async def test_a_disk_that_hangs_does_not_keep_the_service_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvmesh.mesh.line_file.CLOSE_S", 0.05)
    hangs = threading.Event()
    monkeypatch.setattr(LineFile, "_write", lambda file, data: (hangs.wait(), None))
    file = LineFile(tmp_path / "lines", 1000)
    file.put(b"never written")
    await file.close()
    hangs.set()
    assert "takes no more lines" in caplog.text
