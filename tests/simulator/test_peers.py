"""Simulated workers pull prefixes from each other, by the live rules."""

from kvmesh.simulator import SimConfig, SimReport, SimRequest, simulate
from kvmesh.simulator.requests import thread_names

BLOCK, BLOCKS = 16, 200
ISL = BLOCKS * BLOCK + 1


def run(gap_s: float, **settings: object) -> SimReport:
    """Simulate two workers that compute 2,000 tokens a second, and prompts with one beginning."""
    names = thread_names(1, 0, BLOCKS)
    requests = [SimRequest(gap_s * number, ISL, 200, names, 1) for number in range(6)]
    values = {
        "workers": 2, "blocks": 4000, "block_size": BLOCK, "prefill_rate": 2000.0, "itl_s": 0.05, "max_num_seqs": 2
    }  # fmt: skip
    return simulate(requests, SimConfig(**(values | settings)))  # type: ignore[arg-type]


def test_an_idle_worker_pulls_instead_of_computing_again() -> None:
    """Both workers are needed, because each runs two answers at a time: two prompts or one are computed."""
    without, with_peers = run(2.0), run(2.0, peers=True)
    assert (without.failed, with_peers.failed) == (0, 0)
    assert with_peers.hit_share > without.hit_share
    assert with_peers.ttft_s.p99 <= without.ttft_s.p99


def test_pulls_slower_than_computing_are_not_made() -> None:
    slow = run(2.0, peers=True, kv_bandwidth_gbps=0.01)
    assert slow.hit_share == run(2.0).hit_share


def test_equal_input_gives_equal_figures_with_peers() -> None:
    assert run(2.0, peers=True) == run(2.0, peers=True)
