"""The index benchmark: that it runs, and what it fills the index with."""

import json

import pytest

from kvmesh.lab.bench import index as bench
from kvmesh.lab.bench.__main__ import main
from kvmesh.router.index import PrefixIndex


def test_a_chain_has_one_full_holder_and_half_holders() -> None:
    index = PrefixIndex()
    [first, second] = bench.chains(bench.IndexCase(workers=4, blocks=2 * bench.CHAIN, others=2))
    for chain in (first, second):
        bench.store(index, chain, 128)
    prompt = bench.sequence_hash_bytes(first.tokens.tobytes(), bench.BLOCK)
    half = bench.CHAIN // 2
    assert sorted(depths[0] for depths in index.match(prompt).values()) == [half, half, bench.CHAIN]
    assert (index.num_blocks, index.num_entries) == (2 * bench.CHAIN, 4 * bench.CHAIN)


def test_the_index_benchmark_reports_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "run_apart", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(bench, "SMALL", bench.CHAIN)
    monkeypatch.setattr(bench, "PLACED_WORKERS", 4)
    assert main(["index", "--quick", "--json", "--workers", "4", "--blocks", str(2 * bench.CHAIN)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report["match_us"]) == {"64", "512", "4096"}
    for figure in ("store_blocks_per_cpu_s_128", "store_blocks_per_cpu_s_16", "zmq_blocks_per_cpu_s", "place_us_8k"):
        assert report[figure] > 0
    assert len(report["growth"]) == 1
