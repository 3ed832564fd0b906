"""Weights are told apart by their whole content, and hashed once for many starts."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

import kvmesh.workers.loaded_content as loaded_content
import kvmesh.workers.weights_hash as weights_hash
from kvmesh.protocol.errors import StaleCardError
from kvmesh.protocol.kv_content import PENDING
from kvmesh.workers.loaded_content import KvContent, LoadedContent, check_card, content_with
from kvmesh.workers.weights_hash import FileState, WeightsHasher, cache_folder, content_files
from tests.support.patience import PATIENCE_S

OLD_S = 3600.0  # age of files whose hashes are kept


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvmesh" / "weights"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number in range(2):
        (folder / f"model-0000{number}.safetensors").write_bytes(bytes([number]) * 300_000)
    return folder


def fingerprint(folder: Path, settings: str = "float32", **fields: bool) -> str:
    content = LoadedContent(folder, **fields)
    content.begin()
    content.loaded(settings)
    return content.fingerprint


def change(path: Path, place: int) -> None:
    """Change one byte in place, and set the file's time back."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def later() -> float:
    return time.time() + OLD_S


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths of the files that are hashed from now on."""
    found: list[str] = []
    read = WeightsHasher._read

    def noted(self: WeightsHasher, file: FileState) -> bytes:
        found.append(file.path)
        return read(self, file)

    monkeypatch.setattr(WeightsHasher, "_read", noted)
    return found


@pytest.mark.parametrize("place", [0, 70_000, 299_999])
def test_any_byte_of_any_file_counts(model: Path, place: int) -> None:
    before = fingerprint(model)
    change(model / "model-00001.safetensors", place)
    assert fingerprint(model) not in (before, PENDING)


def test_a_copy_has_the_same_fingerprint_and_other_settings_another(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).symlink_to(path)  # as a snapshot of Hugging Face's cache
    (copy / "tokenizer.json").write_text("{}")
    (copy / "README.md").write_text("changes nothing")
    assert fingerprint(copy) == fingerprint(model)
    assert fingerprint(model, "bfloat16") != fingerprint(model)
    (copy / "config.json").unlink()
    (copy / "config.json").write_text('{"rope_theta": 1}')
    assert fingerprint(copy) != fingerprint(model)


def test_an_engine_without_weights_reads_the_configuration_alone(model: Path) -> None:
    before = fingerprint(model, has_weights=False)
    change(model / "model-00001.safetensors", 0)
    assert fingerprint(model, has_weights=False) == before
    assert fingerprint(Path("/nowhere/at/all")) == fingerprint(Path("/nowhere/else")) != PENDING


def test_a_large_file_is_hashed_in_pieces_by_several_threads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_hash, "PIECE_BYTES", 1000)
    monkeypatch.setattr(weights_hash, "READ_BYTES", 300)
    before = fingerprint(model)
    assert before == fingerprint(model)
    change(model / "model-00000.safetensors", 123_456)
    assert fingerprint(model) != before


def test_a_file_is_read_once_for_many_starts(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = reads(monkeypatch)
    for _ in range(2):
        hasher = WeightsHasher(cache_folder(), clock=later)
        digests = {file.path: hasher.digest(file) for file in content_files(model)}
    assert len(found) == 3
    assert len({*digests.values()}) == 3
    assert cache.stat().st_mode & 0o777 == 0o700
    change(model / "model-00000.safetensors", 5)
    [changed] = [file for file in content_files(model) if file.path.endswith("00000.safetensors")]
    assert WeightsHasher(cache_folder()).known(changed) is None


def test_a_hash_of_a_file_that_may_still_change_is_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = reads(monkeypatch)
    fingerprint(model)
    fingerprint(model)
    assert len(found) == 6, "a change within one tick of the clock would not be seen"


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def _other(path: Path) -> None:
    key, digest, check = path.read_text().split()
    path.write_text(f"{key} {digest[::-1]} {check}")


def _binary(path: Path) -> None:
    path.write_bytes(os.urandom(200))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [_empty, _half, _other, _binary, _folder])
def test_damaged_entries_of_the_cache_are_not_used(model: Path, cache: Path, harm: Callable[[Path], None]) -> None:
    [file, *_] = content_files(model)
    right = WeightsHasher(cache_folder(), clock=later).digest(file)
    harm(cache / file.key)
    assert WeightsHasher(cache_folder()).known(file) is None
    assert WeightsHasher(cache_folder(), clock=later).digest(file) == right


def test_a_cache_that_cannot_be_written_is_no_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fingerprint(model)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_folder() is None
    assert fingerprint(model) == expected


def test_a_cache_that_others_could_write_is_closed_to_them(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert cache_folder() == cache
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_cache_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == cache
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    assert cache_folder() is None


def test_workers_that_start_at_once_hash_a_file_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = reads(monkeypatch)
    [file, *_] = content_files(model)
    hashers = [WeightsHasher(cache_folder(), clock=later) for _ in range(8)]
    threads = [threading.Thread(target=hasher.digest, args=(file,)) for hasher in hashers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == [file.path]


def test_a_hash_that_another_process_never_ends_is_made_here(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_hash, "WAIT_S", 0.0)
    [file, *_] = content_files(model)
    hanging = WeightsHasher(cache_folder())
    with hanging._alone(file):
        assert WeightsHasher(cache_folder(), clock=later).digest(file)


def test_the_cache_stays_small(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_hash, "MAX_KEPT", 4)
    for number in range(12):
        path = model / f"{number}.safetensors"
        path.write_bytes(bytes([number]))
        WeightsHasher(cache_folder(), clock=later).digest(weights_hash._state_of(path))
    assert len([*cache.iterdir()]) <= 5


# --- one load ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["while it loads", "replaced"])
def test_weights_that_change_during_the_load_are_never_known(
    model: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    content = LoadedContent(model)
    content.begin()
    path = model / "model-00001.safetensors"
    if when == "replaced":
        (model / "fresh").write_bytes(b"other weights")
        (model / "fresh").replace(path)
    else:
        change(path, 9)
    content.loaded("float32")
    assert (content.fingerprint, content.digest) == (PENDING, b"")
    assert "exchanges no KV" in caplog.text


async def test_large_weights_are_hashed_beside_the_load(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fingerprint(model)
    monkeypatch.setattr(loaded_content, "QUICK_BYTES", 0)
    may_read = threading.Event()
    read = WeightsHasher._read

    def slow(self: WeightsHasher, file: FileState) -> bytes:
        assert may_read.wait(PATIENCE_S)
        return read(self, file)

    monkeypatch.setattr(WeightsHasher, "_read", slow)
    content = LoadedContent(model)
    content.begin()
    content.loaded("float32")
    assert content.fingerprint == PENDING, "the worker serves, and exchanges no KV"
    may_read.set()
    assert (await content.wait()).hex() == expected == content.fingerprint


async def test_weights_that_change_while_they_are_hashed_are_never_known(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_content, "QUICK_BYTES", 0)
    piece = WeightsHasher._piece

    def changing(self: WeightsHasher, descriptor: int, offset: int, end: int, buffer: bytearray) -> bytes:
        found = piece(self, descriptor, offset, end, buffer)
        change(model / "model-00001.safetensors", 4)
        return found

    monkeypatch.setattr(WeightsHasher, "_piece", changing)
    content = LoadedContent(model)
    content.begin()
    content.loaded("float32")
    assert await content.wait() == b""
    assert content.fingerprint == PENDING


def test_a_stopped_worker_hashes_no_further(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hasher = WeightsHasher(None)
    hasher.close()
    with pytest.raises(weights_hash.StoppedError):
        hasher.digest(content_files(model)[1])


def test_an_adapter_has_a_fingerprint_on_its_weights() -> None:
    one, same, other = [content_with(base, [("poet", own)]) for base, own in (("w", "a"), ("w", "a"), ("w", "b"))]
    assert one.of("poet") == same.of("poet") != other.of("poet")
    assert one.of(None) == other.of(None) == "w"
    assert content_with("v", [("poet", "a")]).of("poet") != one.of("poet")
    assert content_with(PENDING, [("poet", "a")]).of("poet") == PENDING
    assert content_with("w", [("poet", PENDING)]).of("poet") == PENDING


@pytest.mark.parametrize(
    ("chosen_by", "now", "is_stale"),
    [
        ("x", "x", False),
        ("x", "y", True),
        ("x", PENDING, True),
        ("x", "", False),
        ("", "y", False),
        (PENDING, "y", False),
    ],
)
def test_a_request_for_other_weights_is_refused(chosen_by: str, now: str, is_stale: bool) -> None:
    with pytest.raises(StaleCardError, match="than its card said") if is_stale else nullcontext():
        check_card(chosen_by, KvContent(now), None)


def test_a_request_for_an_adapter_that_was_replaced_is_refused() -> None:
    content = KvContent("x", (("poet", "b"),))
    check_card("b", content, "poet")
    with pytest.raises(StaleCardError):
        check_card("a", content, "poet")
