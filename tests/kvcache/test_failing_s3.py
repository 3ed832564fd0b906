"""A bucket that is slow, breaks off, refuses or lies: every call ends soon, with what is there or an error."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

pytest.importorskip("obstore")

from kvmesh.kvcache.tiers.objects import ABSENT, Objects
from kvmesh.kvcache.tiers.place import place_of
from kvmesh.kvcache.tiers.s3 import bucket as s3
from kvmesh.kvcache.tiers.s3.bucket import open_bucket
from kvmesh.kvcache.tiers.store import TierIoError
from tests.support.failing_s3 import CREDENTIALS, FailingS3, Trouble
from tests.support.patience import PATIENCE_S

TIMEOUT_S = 0.3
CONTENT = b"0123456789"
CALLS: dict[str, Callable[[Objects], object]] = {
    "list": lambda objects: [one.name for one in objects.listing("m/")],
    "read": lambda objects: objects.read("m/a", 1, 5),
    "get": lambda objects: (objects.get("m/a") or (b"",))[0],
    "put": lambda objects: objects.put("m/new", [b"new"], ABSENT),
    "remove": lambda objects: objects.remove("m/b"),
}
WELL = {"list": ["m/a", "m/b"], "read": b"12345", "get": CONTENT, "put": True, "remove": None}
TROUBLES: tuple[Trouble, ...] = (
    "silent",
    "late",
    "trickle",
    "half",
    "reset",
    "unavailable",
    "denied",
    "garbage",
    "whole",
)
# What a login page is taken for: an empty bucket, and the content of a small object, which proves itself.
LIES = {("garbage", "list"): [], ("garbage", "get"): b"<html><body>Please log in</body></html>"}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingS3]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with FailingS3() as server:
        yield server


def opened(bucket: FailingS3) -> Objects:
    objects = open_bucket(place_of(bucket.place()), bucket.endpoint, TIMEOUT_S)  # type: ignore[arg-type]
    for name in ("m/a", "m/b"):
        objects.put(name, [CONTENT], ABSENT)
    return objects


@pytest.mark.parametrize("call", CALLS)
def test_a_bucket_without_trouble_does_what_it_is_asked_for(bucket: FailingS3, call: str) -> None:
    assert CALLS[call](opened(bucket)) == WELL[call]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_call_to_a_failing_bucket_ends_with_the_truth_or_an_error(
    bucket: FailingS3, trouble: Trouble, call: str
) -> None:
    objects = opened(bucket)
    bucket.trouble, bucket.late_s = trouble, TIMEOUT_S / 3
    began_s = time.monotonic()
    with suppress(TierIoError):
        assert CALLS[call](objects) == LIES.get((trouble, call), WELL[call])
    assert time.monotonic() - began_s < PATIENCE_S


def test_an_object_whose_answer_was_lost_is_there_and_stays(bucket: FailingS3) -> None:
    objects = opened(bucket)
    bucket.trouble = "reset"
    with pytest.raises(TierIoError):
        objects.put("m/new", [b"first"], ABSENT)
    bucket.trouble = ""
    assert not objects.put("m/new", [b"second"], ABSENT)
    assert objects.read("m/new", 0, 9) == b"first"


@pytest.mark.parametrize("limit", ["LISTING_S", "MOST_LISTED"])
def test_a_listing_without_an_end_is_given_up(bucket: FailingS3, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    objects = opened(bucket)
    bucket.trouble = "endless"
    monkeypatch.setattr(s3, limit, 1)
    with pytest.raises(TierIoError, match="no end after"):
        objects.listing("m/")
