"""Storage that workers share: every kind keeps these rules."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvmesh.kvcache.tiers.objects import ABSENT, FolderObjects, MissingObjectError, Objects
from kvmesh.kvcache.tiers.store import TierIoError
from tests.support.s3_server import WHY_NONE, new_objects


def in_memory(_: Path) -> Objects:
    """Return what speaks to S3, over obstore's own store without a server."""
    obstore = pytest.importorskip("obstore")
    from kvmesh.kvcache.tiers.s3.bucket import S3Objects

    return S3Objects(obstore.store.MemoryStore())


KINDS: dict[str, Callable[[Path], Objects]] = {"folder": FolderObjects, "s3": in_memory}
if not WHY_NONE:
    KINDS["s3 server"] = lambda _: new_objects()


@pytest.fixture(params=KINDS)
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Objects]:
    opened = KINDS[request.param](tmp_path)
    yield opened
    opened.close()
    opened.close()


def test_a_part_behind_the_end_is_empty(objects: Objects) -> None:
    objects.put("m/a", [b"123"], ABSENT)
    assert objects.read("m/a", 3, 5) == b""


def test_what_was_put_is_listed_and_read(objects: Objects) -> None:
    assert objects.put("m/e/a", [b"head", memoryview(b"body")], ABSENT)
    [found] = objects.listing("m/e/")
    assert (found.name, found.num_bytes) == ("m/e/a", 8)
    assert objects.read("m/e/a", 2, 4) == b"adbo"
    assert objects.read("m/e/a", 6, 100) == b"dy"
    assert [one.name for one in objects.listing("")] == ["m/e/a"]


def test_a_folder_lists_its_own_objects_alone(objects: Objects) -> None:
    for name in ("m/e/a", "m/e2/b", "m/x", "n/e/c"):
        objects.put(name, [b"1"], ABSENT)
    assert [one.name for one in objects.listing("m/e/")] == ["m/e/a"]
    assert sorted(one.name for one in objects.listing("m/")) == ["m/e/a", "m/e2/b", "m/x"]
    assert objects.listing("nothing/") == []


def test_an_object_is_created_once(objects: Objects) -> None:
    assert objects.put("a/b", [b"first"], ABSENT)
    assert not objects.put("a/b", [b"second"], ABSENT)
    assert objects.read("a/b", 0, 10) == b"first"


def test_a_version_is_replaced_once(objects: Objects) -> None:
    objects.put("lease", [b"one"], ABSENT)
    found = objects.get("lease")
    assert found is not None
    assert found[0] == b"one"
    assert objects.put("lease", [b"two"], found[1])
    assert not objects.put("lease", [b"three"], found[1])
    now = objects.get("lease")
    assert now is not None
    assert now[0] == b"two"
    assert not objects.put("other", [b"four"], found[1])


def test_whatever_is_there_can_be_replaced(objects: Objects) -> None:
    for content in (b"one", b"two"):
        assert objects.put("m/epoch", [content], None)
        assert objects.read("m/epoch", 0, 10) == content


def test_of_many_that_create_one_object_one_does(objects: Objects) -> None:
    created = list[int]()
    threads = [
        threading.Thread(target=lambda i=i: objects.put("m/a", [bytes([i])], ABSENT) and created.append(i))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bytes([i]) for i in created] == [objects.read("m/a", 0, 1)]


def test_what_is_not_there_is_missing(objects: Objects) -> None:
    assert objects.get("m/none") is None
    with pytest.raises(MissingObjectError):
        objects.read("m/none", 0, 1)
    objects.remove("m/none")
    objects.touch("m/none")


def test_a_removed_object_is_gone(objects: Objects) -> None:
    objects.put("m/a", [b"1"], ABSENT)
    objects.touch("m/a")
    objects.remove("m/a")
    assert objects.listing("m/") == []
    assert objects.put("m/a", [b"2"], ABSENT)


def test_a_pipe_in_the_folder_keeps_nobody_waiting(tmp_path: Path) -> None:
    objects = FolderObjects(tmp_path)
    objects.put("m/a", [b"123"], ABSENT)
    os.mkfifo(tmp_path / "m" / "pipe")
    assert [found.name for found in objects.listing("m/")] == ["m/a"]
    for read in (lambda: objects.get("m/pipe"), lambda: objects.read("m/pipe", 0, 3)):
        with pytest.raises(TierIoError, match="no regular file"):
            read()
