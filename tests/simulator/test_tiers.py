"""Simulated workers keep evicted prefixes in host memory, by the live rules."""

import pytest

from kvmesh.simulator import SimConfig, SimReport, SimRequest, simulate
from kvmesh.simulator.requests import thread_names
from kvmesh.simulator.tiers import SimStorage
from tests.support.disk import chain

BLOCK = 16
ISL = 20 * BLOCK + 1


def circle(rounds: int, prompts: int = 4) -> list[SimRequest]:
    """Return prompts that are asked for in turn, one a second."""
    return [
        SimRequest(float(number), ISL, 2, thread_names(number % prompts, 0, ISL // BLOCK), number % prompts)
        for number in range(rounds * prompts)
    ]


def run(**settings: object) -> SimReport:
    """Simulate one worker that computes 1,000 tokens a second, with room for two prompts and a half."""
    return simulate(circle(6), _config(**settings))


def _config(**settings: object) -> SimConfig:
    values = {"workers": 1, "blocks": 54, "block_size": BLOCK, "prefill_rate": 1000.0, "itl_s": 0.01}
    return SimConfig(**(values | settings))  # type: ignore[arg-type]


def test_evicted_prefixes_come_back_in_the_time_of_the_copy() -> None:
    """A token has 131,072 bytes, so a prompt has 42 MB, which take 20 ms at 2.1 gigabytes per second."""
    without, fast = run(), run(host_blocks=200, host_bandwidth_gbps=2.1)
    assert without.hit_share == 0
    assert fast.hit_share == pytest.approx(5 / 6, abs=0.02)
    assert fast.ttft_s.p50 == pytest.approx(0.02 + 0.01, rel=0.05), "the load, and the step of its last token"
    assert without.ttft_s.p50 == pytest.approx(ISL / 1000, rel=0.01)


def test_a_tier_slower_than_computing_is_left_alone() -> None:
    without, slow = run(), run(host_blocks=200, host_bandwidth_gbps=0.05)
    assert slow.ttft_s.p50 <= 1.15 * without.ttft_s.p50


def test_a_disk_gives_back_what_was_asked_for_twice() -> None:
    """The first two rounds compute; the disk has each prompt after the second one."""
    disk = run(disk_blocks=200, disk_bandwidth_gbps=2.1)
    assert disk.hit_share == pytest.approx(4 / 6, abs=0.02)
    assert disk.ttft_s.p50 == pytest.approx(0.02 + 0.01, rel=0.05)


def test_a_disk_below_a_small_host_memory_finds_more() -> None:
    small = run(host_blocks=42, host_bandwidth_gbps=25.0)
    both = run(host_blocks=42, host_bandwidth_gbps=25.0, disk_blocks=200, disk_bandwidth_gbps=2.1)
    assert both.hit_share > small.hit_share + 0.2


def test_a_worker_finds_what_another_has_stored() -> None:
    """One worker in turn with the other asks for the prompts: a cache of its own sees each prompt half as often."""
    settings = {"workers": 2, "policy": "round-robin", "blocks": 54}
    shared = {"shared_blocks": 400, "shared_bandwidth_gbps": 2.1}
    load = circle(8, prompts=5)
    own = simulate(load, _config(**settings, disk_blocks=400, disk_bandwidth_gbps=2.1))
    both = simulate(load, _config(**settings, **shared))
    assert both.hit_share > own.hit_share + 0.05


def test_storage_keeps_the_latest_blocks_and_shows_them_late() -> None:
    storage, blocks = SimStorage(3), chain(1, 5)
    for number, block in enumerate(blocks):
        storage.add(block, float(number))
    assert [block.name for block in storage.since(0, 3.0)] == [block.name for block in blocks[2:4]]
    seen = storage.seen(0, 2)
    assert [block.name for block in storage.since(seen, 9.0)] == [blocks[4].name]
    assert list(storage.since(storage.seen(seen, 1), 9.0)) == []


def test_equal_input_gives_equal_figures_with_tiers() -> None:
    tiers = {"host_blocks": 42, "disk_blocks": 200}
    assert run(**tiers) == run(**tiers)
