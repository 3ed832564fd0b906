"""The cache of pieces keeps what was asked for lately, and no more than its bound."""

import threading

from kvmesh.frontend.tokenizing.cache import PieceCache


def test_what_was_put_is_found_and_counted() -> None:
    cache = PieceCache(10_000)
    assert cache.get(["a", "b"], "") == [None, None]
    cache.put(["a"], [b"ids!"], "")
    assert cache.get(["a", "b", "a"], "") == [b"ids!", None, b"ids!"]
    assert (cache.hits, cache.misses) == (2, 3)


def test_a_piece_is_found_with_its_salt_only() -> None:
    cache = PieceCache(10_000)
    cache.put(["a"], [b"ids!"], "tenant")
    assert cache.get(["a"], "") == cache.get(["a"], "other") == [None]
    assert cache.get(["a"], "tenant") == [b"ids!"]


def test_the_least_recently_used_goes_first() -> None:
    cache = PieceCache(10_000)
    cache.put(["old", "used", "new"], [b"ids!"] * 3, "")
    cache.get(["used"], "")
    for n in range(1000):
        cache.put([f"more {n}"], [b"ids!"], "")
        if len(cache) < n + 4:  # the first one had to go
            break
    assert cache.get(["old", "used", "new"], "") == [None, b"ids!", b"ids!"]


def test_its_bytes_are_bounded_and_come_back() -> None:
    cache = PieceCache(20_000)
    for n in range(1000):
        cache.put([f"{n} " * 20], [b"x" * (n % 300)], "")
        assert cache.bytes <= cache.max_bytes
    assert 10 < len(cache) < 100


def test_a_piece_as_big_as_the_cache_drives_nothing_out() -> None:
    cache = PieceCache(10_000)
    cache.put(["small"], [b"ids!"], "")
    cache.put(["x" * 9000], [b"x" * 400], "")
    assert cache.get(["small", "x" * 9000], "") == [b"ids!", None]


def test_a_piece_put_twice_counts_once() -> None:
    cache = PieceCache(10_000)
    cache.put(["a", "a"], [b"ids!", b"ids!"], "")
    size = cache.bytes
    cache.put(["a"], [b"ids!"], "")
    assert (len(cache), cache.bytes) == (1, size)


def test_threads_may_share_it() -> None:
    cache = PieceCache(50_000)

    def work(seed: int) -> None:
        for n in range(2000):
            piece = f"{(seed * 7 + n) % 300} " * 10
            if cache.get([piece], "") == [None]:
                cache.put([piece], [piece.encode()], "")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.hits + cache.misses == 12_000
    assert cache.bytes <= 50_000
    assert all(ids is None or ids == piece.encode() for n in range(300) for piece in [f"{n} " * 10]
               for ids in cache.get([piece], ""))  # fmt: skip
