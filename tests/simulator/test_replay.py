"""Replaying a trace: what is counted, and what routing by cached prefixes is worth."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvmesh.protocol.errors import ConfigError
from kvmesh.simulator import SimReport
from kvmesh.simulator.arrivals import jittered
from kvmesh.simulator.mooncake import TraceRow, from_rows, stream_rows
from kvmesh.simulator.replay import ReplayConfig, main, replay

BLOCK = 64
RATE = 640.0  # tokens/s: ten blocks


def row(at_s: float, blocks: Sequence[int], tokens: int | None = None) -> TraceRow:
    length = len(blocks) * BLOCK if tokens is None else tokens
    return TraceRow(timestamp=at_s * 1e3, input_length=length, hash_ids=list(blocks))


def run(rows: list[TraceRow], **settings: Any) -> SimReport:
    values = {
        "workers": 1,
        "blocks_per_worker": 101,
        "block_size": BLOCK,
        "prefill_rate": RATE,
        "max_step_tokens": BLOCK,
    }
    config = ReplayConfig(**(values | settings))
    requests = from_rows(rows, BLOCK, BLOCK)
    return replay(jittered(requests, config.jitter_s, config.seed) if config.jitter_s else requests, config)


def conversations(count: int, turns: int, gap_s: float) -> list[TraceRow]:
    """Return `count` conversations side by side, each turn ten blocks longer than the last."""
    return [
        row(turn * gap_s + number * 0.1, [0, *(1000 * number + i for i in range(1, 10 * (turn + 1)))])
        for turn in range(turns)
        for number in range(count)
    ]


def test_one_prompt_takes_its_length_over_the_rate() -> None:
    report = run([row(1.0, range(20))])
    assert report.ttft_s.mean == report.ttft_s.p99 == pytest.approx(2.0)
    assert (report.hit_share, report.balance, report.failed) == (0.0, 1.0, 0)


def test_a_second_prompt_waits_for_the_first() -> None:
    report = run([row(0, range(20)), row(0, range(100, 120))])
    assert report.ttft_s.max == pytest.approx(4.0)
    assert report.ttft_s.mean == pytest.approx(3.0)


def test_only_what_is_not_cached_is_computed() -> None:
    report = run([row(0, range(20)), row(10, range(30))])
    assert report.hit_share == pytest.approx(20 / 50)
    assert report.ttft_s.mean == pytest.approx((2.0 + 1.0) / 2)
    assert report.predicted_hit_share == report.hit_share


def test_a_partly_filled_block_is_never_shared() -> None:
    half = 19 * BLOCK + BLOCK // 2
    report = run([row(0, range(20), half), row(10, range(20), half)])
    assert report.hit_share == pytest.approx(19 * BLOCK / half / 2)


def test_a_sibling_that_comes_before_the_events_is_counted_on() -> None:
    report = run([row(0, range(20)), row(0.5, range(20))], workers=2, event_lag_s=5.0, saturation_tokens=0)
    assert report.hit_share == pytest.approx(19 / 40), "the last token of a prompt is always computed, with its block"


def test_an_evicted_prefix_is_not_predicted() -> None:
    rows = [row(20 * i, range(1000 * (i % 3), 1000 * (i % 3) + 50)) for i in range(12)]
    report = run(rows, blocks_per_worker=100)
    assert report.hit_share == report.predicted_hit_share == 0.0


def test_an_evicted_prefix_is_no_hit() -> None:
    rows = [row(0, range(80)), row(20, range(100, 180)), row(40, range(80))]
    assert run(rows, blocks_per_worker=100).hit_share < 0.3
    assert run(rows, blocks_per_worker=200).hit_share == pytest.approx(79 / 240)


def test_a_prompt_larger_than_the_cache_fails() -> None:
    report = run([row(0, range(50)), row(10, range(10))], blocks_per_worker=30)
    assert (report.requests, report.failed) == (2, 1)


def test_a_conversation_is_cheaper_where_its_prefix_is() -> None:
    rows = conversations(count=12, turns=5, gap_s=30.0)
    kv, blind = (run(rows, workers=4, blocks_per_worker=400, policy=policy) for policy in ("kv", "random"))
    assert kv.hit_share > 0.6
    assert kv.hit_share > 1.5 * blind.hit_share
    assert kv.ttft_s.mean < blind.ttft_s.mean


def test_a_popular_prefix_is_copied_instead_of_queued_for() -> None:
    rows = [row(i * 0.15, [*range(40), *range(1000 * i + 100, 1000 * i + 105)]) for i in range(400)]
    kv = run(rows, workers=4)
    assert kv.balance < 1.3
    assert kv.ttft_s.p99 < 6.0
    assert run(rows, workers=4, recompute_price=20.0, saturation_tokens=0).ttft_s.p99 > 2 * kv.ttft_s.p99


def test_the_same_seed_gives_the_same_figures() -> None:
    rows = conversations(count=8, turns=4, gap_s=3.0)
    for settings in ({"policy": "random"}, {"policy": "power-of-two"}, {"jitter_s": 3.0}):
        first, second = (run(rows, workers=3, seed=7, **settings) for _ in range(2))
        assert first.ttft_s.mean == second.ttft_s.mean
        assert first.ttft_s.mean != run(rows, workers=3, seed=8, **settings).ttft_s.mean


def test_routers_that_know_of_each_other_herd_less() -> None:
    """Four routers that see the same caches would all send to the same worker."""
    rows = [row(i * 0.15, range(1000 * i, 1000 * i + 8)) for i in range(300)]
    known = run(rows, workers=8, routers=4, gossip_lag_s=0.001)
    unknown = run(rows, workers=8, routers=4, gossip_lag_s=1e6)
    assert known.ttft_s.mean < 0.8 * unknown.ttft_s.mean


def test_a_trace_without_all_its_blocks_keeps_its_lengths() -> None:
    [request] = from_rows([row(0, [1, 2], 3 * BLOCK + 7)], BLOCK, BLOCK)
    assert (request.isl_tokens, len(request.names)) == (3 * BLOCK + 7, 8 * 3)


def test_blocks_of_a_trace_are_cut_into_smaller_ones() -> None:
    [whole] = from_rows([row(0, [7, 9], 2 * BLOCK)], BLOCK, BLOCK)
    [cut] = from_rows([row(0, [7, 9], 2 * BLOCK)], BLOCK // 4, BLOCK)
    assert (len(whole.names), len(cut.names)) == (8 * 2, 8 * 8)
    assert len({cut.names[i : i + 8] for i in range(0, 64, 8)}) == 8
    with pytest.raises(ConfigError, match="--trace-block-size"):
        list(from_rows([row(0, [7])], BLOCK + 1, BLOCK))


def test_rows_are_played_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 5, "input_length": 1, "hash_ids": [2]}\n\n{"timestamp": 1, "input_length": 1, "hash_ids": [1]}\n'
    )
    assert [r.timestamp for r in stream_rows(path)] == [1, 5]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"timestamp": -1, "input_length": 1, "hash_ids": []}'])
def test_a_file_that_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace\.jsonl"):
        list(stream_rows(path))


def test_a_missing_trace_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no trace at /nowhere"):
        main(["--trace", "/nowhere"])


def test_the_command_prints_a_summary_and_writes_the_time_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [1, 2]}\n')
    flags = ["--workers", "2", "--blocks-per-worker", "10", "--block-size", "512", "--prefill-rate", "512"]
    assert (
        main(["--trace", str(path), *flags, "--policy", "kv", "--json", "--timeline", str(tmp_path / "line.json")]) == 0
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"hit_share", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "balance"} <= set(report)
    assert report["ttft_mean_s"] == pytest.approx(2.0)
    assert report["assumed"]["SLO"] == "TTFT 0.5 s, mean ITL 50 ms"
    assert "timeline" not in report
    assert set(json.loads((tmp_path / "line.json").read_text())) == {"timeline", "changes", "changes_left_out"}


def test_the_table_names_slo_model_and_gpu_within_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--load", "constant", "--duration-s", "5"]) == 0
    told = capsys.readouterr().out
    assert "TTFT 0.5 s, mean ITL 50 ms" in told
    assert "a fit to an 8B model on one data-centre GPU" in told
    assert "…" not in told
