"""Memory for runs is whole pages, and no two runs that are on their way share any."""

import threading

import pytest

from kvmesh.kvcache.tiers.run_memory import HUGE_BYTES, RunMemories, whole_pages
from kvmesh.kvcache.tiers.slots import PAGE_BYTES

PAGES = 3 * PAGE_BYTES


@pytest.mark.parametrize("num_bytes", [PAGE_BYTES, HUGE_BYTES // 2, HUGE_BYTES, HUGE_BYTES + PAGE_BYTES])
def test_memory_begins_at_a_page_and_large_memory_at_a_huge_one(num_bytes: int) -> None:
    memory = whole_pages(num_bytes)
    assert memory.nbytes == num_bytes
    assert not memory.any()
    assert memory.ctypes.data % (HUGE_BYTES if num_bytes >= HUGE_BYTES // 2 else PAGE_BYTES) == 0
    memory[:] = 255


def test_runs_on_their_way_have_memory_of_their_own() -> None:
    memories = RunMemories(3, PAGE_BYTES, PAGES)
    for number in range(3):
        headers, payloads = memories.of(number)
        assert (headers.nbytes, payloads.nbytes) == (PAGE_BYTES, PAGES)
        headers[:], payloads[:] = 2 * number + 1, 2 * number + 2
    assert [(run.headers.max(), run.payloads.min()) for run in map(memories.of, range(3))] == [(1, 2), (3, 4), (5, 6)]
    assert memories.of(4).headers.ctypes.data == memories.of(1).headers.ctypes.data


def test_each_thread_has_memory_of_its_own() -> None:
    memories, places = RunMemories(2, PAGE_BYTES, PAGES), list[int]()
    memories.of(0).payloads[:] = 7
    other = threading.Thread(target=lambda: places.append(int(memories.of(0).payloads.sum())))
    other.start()
    other.join()
    assert places == [0]
