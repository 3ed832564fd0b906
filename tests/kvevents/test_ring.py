"""The replay ring's bounds."""

from kvmesh.kvevents.publisher import ReplayRing


def kept(ring: ReplayRing, since: int = 0, limit: int = 99) -> list[tuple[int, bytes]]:
    return list(ring.since(since, limit))


def test_batches_are_numbered_from_0_and_kept() -> None:
    ring = ReplayRing(10, 100)
    assert [ring.append(b"a"), ring.append(b"b")] == [0, 1]
    assert kept(ring) == [(0, b"a"), (1, b"b")]


def test_the_oldest_make_room_by_number() -> None:
    ring = ReplayRing(2, 100)
    for payload in (b"a", b"b", b"c"):
        ring.append(payload)
    assert kept(ring) == [(1, b"b"), (2, b"c")]
    assert (ring.first_seq, ring.next_seq) == (1, 3)


def test_the_oldest_make_room_by_size() -> None:
    ring = ReplayRing(10, 4)
    for payload in (b"aa", b"bb", b"ccc"):
        ring.append(payload)
    assert kept(ring) == [(2, b"ccc")]
    assert ring.num_bytes == 3


def test_a_batch_larger_than_the_ring_is_kept_alone() -> None:
    ring = ReplayRing(10, 4)
    ring.append(b"aa")
    ring.append(b"bbbbbbb")
    assert kept(ring) == [(1, b"bbbbbbb")]


def test_slices_begin_where_asked_and_end_at_the_limit() -> None:
    ring = ReplayRing(3, 100)
    for number in range(5):
        ring.append(b"%d" % number)
    assert kept(ring, since=3) == [(3, b"3"), (4, b"4")]
    assert kept(ring, since=0, limit=2) == [(2, b"2"), (3, b"3")]
    assert kept(ring, since=5) == []
    assert kept(ring, since=2**64 - 1) == []
