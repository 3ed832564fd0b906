"""Tests of the files that a frontend needs of a model: from a folder, from the cache, or from a worker."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvmesh.frontend.model_files import ModelFolders
from kvmesh.frontend.models import ModelRegistry
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.errors import ConfigError, MeshError
from kvmesh.protocol.messages import ModelFilePart, WorkerCard
from kvmesh.protocol.model_files import MAX_MODEL_FILE_BYTES, ModelFile, fingerprint
from kvmesh.workers.model_files import OfferedFiles, model_files
from tests.frontend import tiny


class Site:
    """A worker with the model's folder, and a frontend that does not have it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder / "model", folder / "cache"
        tiny.save_model(self.folder)
        self.files = model_files(self.folder)
        self.offered, self.plane = OfferedFiles(), PlaneClient()
        self.offered.offer(self.folder, self.files)
        self.asked = 0
        self.sends: list[bytes] | None = None  # instead of the file
        self.server = PlaneServer({"model_file": self.answer})
        self.folders = ModelFolders(self.plane, self.cache, 1 << 30)

    async def answer(self, call: Call) -> None:
        self.asked += 1
        if self.sends is None:
            await self.offered.answer(call)
        else:
            for part in self.sends:
                await call.send(ModelFilePart(data=part))

    async def start(self) -> None:
        self.address = await self.server.start("127.0.0.1")

    def card(self, name: str = "w", path: str = "/nowhere", **fields: object) -> WorkerCard:
        return replace(tiny.card(name, path=path), address=self.address, model_files=tuple(self.files), **fields)


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    (tmp_path / "model").mkdir()
    site = Site(tmp_path)
    await site.start()
    yield site
    await site.plane.close()
    await site.server.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_a_frontend_without_the_folder_gets_it_from_a_worker(site: Site) -> None:
    registry = ModelRegistry(folders=site.folders)
    registry.add(site.card())
    model = await registry.get("tiny")
    assert model.tokenizer.vocab_size > 0
    assert model.template is not None
    found = site.cache / fingerprint(site.files)
    assert contents(found) == {file.name: (site.folder / file.name).read_bytes() for file in site.files}


async def test_the_cache_is_used_the_second_time(site: Site) -> None:
    first = await site.folders.find([site.card()])
    asked = site.asked
    assert await ModelFolders(site.plane, site.cache, 1 << 30).find([site.card()]) == first
    assert site.asked == asked


async def test_a_cache_that_can_only_be_read_is_used(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await site.folders.find([site.card()])

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert await site.folders.find([site.card()]) == first


async def test_a_folder_with_the_same_files_is_used_where_it_is(site: Site) -> None:
    assert await site.folders.find([site.card(path=str(site.folder))]) == site.folder
    assert site.asked == 0


async def test_a_folder_with_other_contents_does_not_count(site: Site, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tiny.save_model(other)
    (other / "tokenizer_config.json").write_text("{}")
    assert await site.folders.find([site.card(path=str(other))]) == site.cache / fingerprint(site.files)


@pytest.mark.parametrize("path", ["/private/model", "/no\0path"])
async def test_a_folder_that_cannot_be_read_does_not_count(
    site: Site, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        if str(self).startswith("/private/"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return look(self, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert contents(await site.folders.find([site.card(path=path)])) == contents(site.folder)


async def test_a_broken_cache_is_filled_again(site: Site) -> None:
    kept = await site.folders.find([site.card()])
    (kept / "tokenizer.json").write_bytes(b"broken")
    assert await site.folders.find([site.card()]) == kept
    assert (kept / "tokenizer.json").read_bytes() == (site.folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("sends", [[b"other contents"], [b"x" * 1000] * 100_000, []], ids=["other", "longer", "none"])
async def test_a_worker_that_lies_is_not_believed(site: Site, sends: list[bytes]) -> None:
    site.sends = sends
    with pytest.raises(MeshError, match=r"tokenizer\.json"):
        await site.folders.find([site.card()])
    assert not list(site.cache.iterdir())


async def test_another_worker_is_asked_if_one_does_not_answer(site: Site) -> None:
    gone = replace(site.card("gone"), address="127.0.0.1:1")
    assert (await site.folders.find([gone, site.card()])).is_dir()


@pytest.mark.parametrize("name", ["../evil", "config.json", "/etc/passwd", ""])
async def test_a_card_cannot_name_other_files(site: Site, name: str) -> None:
    card = site.card()
    with pytest.raises(MeshError, match="model files that are not known"):
        await site.folders.find([replace(card, model_files=(*card.model_files, ModelFile(name, 1, "0" * 64)))])


async def test_a_file_that_a_worker_does_not_have_is_refused(site: Site) -> None:
    strange = ModelFile("tokenizer.json", 5, "0" * 64)
    with pytest.raises(MeshError, match="no such model file"):
        await site.folders.find([replace(site.card(), model_files=(strange,))])


async def test_a_cache_that_cannot_be_written_says_what_to_set(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"cannot write the model cache .*; set --model-cache"):
        await ModelFolders(site.plane, tmp_path / "file", 1 << 30).find([site.card()])


async def test_the_cache_is_bounded_and_the_latest_stays(site: Site) -> None:
    folders = ModelFolders(site.plane, site.cache, 1)
    first = await folders.find([site.card()])
    os.utime(first, (1, 1))
    (site.folder / "tokenizer_config.json").write_text("{}")
    site.files = model_files(site.folder)
    site.offered.offer(site.folder, site.files)
    second = await folders.find([site.card()])
    assert [path.name for path in site.cache.iterdir()] == [second.name]


async def test_what_a_killed_frontend_left_half_written_goes(site: Site) -> None:
    left, fresh = site.cache / "a.1.new", site.cache / "b.2.new"
    for folder in (left, fresh):
        folder.mkdir(parents=True)
    os.utime(left, (1, 1))
    kept = await site.folders.find([site.card()])
    assert set(site.cache.iterdir()) == {kept, fresh}


async def test_two_frontends_may_fill_one_cache_at_once(site: Site) -> None:
    others = [ModelFolders(site.plane, site.cache, 1 << 30) for _ in range(4)]
    found = await asyncio.gather(*[folders.find([site.card()]) for folders in others])
    assert len(set(found)) == 1
    assert [path.name for path in site.cache.iterdir()] == [found[0].name]


def test_a_file_that_is_too_large_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.workers.model_files.MAX_MODEL_FILE_BYTES", 10)
    assert MAX_MODEL_FILE_BYTES > 10
    (tmp_path / "tokenizer.json").write_bytes(b"x" * 11)
    (tmp_path / "chat_template.jinja").write_bytes(b"x")
    assert [file.name for file in model_files(tmp_path)] == ["chat_template.jinja"]


async def test_models_with_the_same_tokenizer_share_it(site: Site) -> None:
    registry = ModelRegistry(folders=site.folders)
    for name in ("one", "two", "three"):
        registry.add(replace(site.card(name), model=name))
    models = await asyncio.gather(*[registry.get(name) for name in ("one", "two", "three")])
    assert len({id(model.tokenizer) for model in models}) == 1
    assert [model.name for model in models] == ["one", "two", "three"]
