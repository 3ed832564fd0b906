"""KV in a bucket of a real S3 server. `make test-s3` runs this, and the contract tests with that server."""

import time
from pathlib import Path

import pytest

from kvmesh.commands import doctor
from kvmesh.kvcache.tiers.collect import SharedLimits
from kvmesh.kvcache.tiers.store import TierError, TierIoError
from kvmesh.workers.shared_tier import SharedSettings, open_objects
from tests.e2e.test_kv_disk import PROMPT, cached
from tests.e2e.test_kv_shared import shared_bytes, who_saved
from tests.support.disk import chain, payload_of, put, read
from tests.support.mesh import running_mesh, until
from tests.support.s3_server import WHY_NONE, new_objects, the_server
from tests.support.shared import Member

pytestmark = pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)


def test_another_worker_reads_what_one_has_put_into_a_bucket(tmp_path: Path) -> None:
    bucket = new_objects()
    one, other = Member(tmp_path, bucket=bucket), Member(tmp_path, bucket=bucket)
    blocks = chain(1, 20)
    put(one.store, blocks)
    other.refresh()
    assert [read(other.store, block) for block in blocks] == [payload_of(block) for block in blocks]
    one.store.clear()
    other.refresh()
    assert len(other.index) == 0


def test_a_damaged_object_of_a_bucket_is_removed(tmp_path: Path) -> None:
    bucket = new_objects()
    one, other = Member(tmp_path, bucket=bucket), Member(tmp_path, bucket=bucket)
    blocks = chain(1, 3)
    put(one.store, blocks)
    other.refresh()
    [found] = [each for each in bucket.listing("") if each.name.count("/") == 2]
    data = bytearray(bucket.read(found.name, 0, found.num_bytes))
    data[-1] ^= 1
    bucket.put(found.name, [bytes(data)], None)
    assert [read(other.store, block) for block in blocks[:2]] == [payload_of(block) for block in blocks[:2]]
    with pytest.raises(TierError, match="damaged"):
        read(other.store, blocks[2])
    assert [each.name for each in bucket.listing("") if each.name.count("/") == 2] == []


def test_a_bucket_is_collected_by_size(tmp_path: Path) -> None:
    bucket = new_objects()
    one = Member(tmp_path, SharedLimits(5 << 20, 3600.0), max_blocks=2000, bucket=bucket)
    for number in range(1, 6):
        put(one.store, chain(number, 200))
    with pytest.raises(TierError, match="full"):
        put(one.store, chain(9, 200))
    assert one.refresh().collected_bytes > 4 << 20
    put(one.store, chain(9, 200))


def test_a_server_that_is_not_there_fails_in_time() -> None:
    objects = open_objects(SharedSettings("s3://bucket", 1 << 30, timeout_s=1.0, endpoint="http://127.0.0.1:1"))
    began = time.monotonic()
    with pytest.raises(TierIoError, match="cannot be listed"):
        objects.listing("")
    assert time.monotonic() - began < 10


def test_the_doctor_tries_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    server = the_server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    place = server.place()
    assert doctor.check_shared_storage(place).status == "ok"
    assert "cannot be written" in doctor.check_shared_storage("s3://no-such-bucket/kv").found
    monkeypatch.setenv("AWS_ENDPOINT_URL", "not a url")
    assert doctor.check_shared_storage(place).status == "warn"


def test_another_worker_of_a_mesh_uses_the_prefix_of_a_killed_one(tmp_path: Path) -> None:
    server = the_server()
    flags = ("--prefill", "0", "--decode", "0", "--aggregated", "2", "--kv-shared", server.place())
    with running_mesh(tmp_path / "run", *flags, "--kv-shared-endpoint", server.endpoint) as mesh:
        for _ in range(3):
            answer = mesh.complete(PROMPT, max_tokens=4)
        [first] = who_saved(mesh)
        [other] = set(mesh.workers()) - {first}
        until(lambda: mesh.metric("kvmesh_worker_kv_tier_blocks", other, tier="shared") == 12, what="the other to list")
        mesh.kill(first)
        until(lambda: first not in mesh.workers(), what="the killed worker to be missed")
        again = mesh.complete(PROMPT, max_tokens=4)
        assert cached(again) == 16 * 12
        assert again["choices"][0]["text"] == answer["choices"][0]["text"]
        assert shared_bytes(mesh, "loaded", other) > 0
