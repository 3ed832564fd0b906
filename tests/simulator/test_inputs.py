"""Tests of the simulator's inputs: load shapes, traces, access logs; and of the percentiles."""

import json
import random
from array import array
from base64 import b64encode
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.hashing import unpack_hashes
from kvmesh.simulator.access_log import LineCounts, read_access_log
from kvmesh.simulator.loads import Rate, Shape, arrivals, bursty, constant, diurnal, sawtooth, step, synthesize
from kvmesh.simulator.mooncake import stream_rows
from kvmesh.simulator.replay import ReplayConfig, main, rate_of, requests_of
from kvmesh.simulator.tally import PercentileTally
from kvmesh.simulator.traces import kind_of

SHAPES = [constant(3), diurnal(3, 0.5, 100), bursty(1, 9, 30, 10), step(1, 5, 30, 60), sawtooth(0, 6, 20)]


@pytest.mark.parametrize("rate", SHAPES)
def test_a_rate_stays_within_its_bounds(rate: Rate) -> None:
    assert all(0 <= rate.at(t) <= rate.most_rps for t in range(0, 300, 3))


@pytest.mark.parametrize("rate", SHAPES)
def test_as_many_arrive_as_the_rate_says(rate: Rate) -> None:
    expected = sum(rate.at(t / 10) for t in range(10_000)) / 10
    came = list(arrivals(rate, 1000.0, seed=3))
    assert came == sorted(came)
    assert len(came) == pytest.approx(expected, rel=0.1)


def test_a_step_goes_up_and_down_again() -> None:
    rate = step(1, 5, up_s=10, down_s=20)
    assert [rate.at(t) for t in (0, 9.9, 10, 19.9, 20, 100)] == [1, 1, 5, 5, 1, 1]


def test_a_day_begins_at_its_lowest() -> None:
    rate = diurnal(10, swing=0.6, period_s=100)
    assert (rate.at(0), rate.at(50), rate.at(100)) == pytest.approx((4, 16, 4))


@given(st.integers(0, 100), st.integers(1, 4), st.integers(0, 3), st.floats(0, 1))
def test_equal_seeds_give_equal_requests_in_order(seed: int, turns: int, groups: int, spread: float) -> None:
    shape = Shape(isl_tokens=200, osl_tokens=30, spread=spread, groups=groups, prefix_tokens=64, turns=turns, pause_s=3)
    first, second = (list(synthesize(constant(2.0), 20, shape, seed=seed, block_size=16)) for _ in range(2))
    assert first == second
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(first))
    assert all(len(r.names) == r.isl_tokens // 16 * 8 for r in first)


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    shape = Shape(isl_tokens=100, osl_tokens=20, groups=2, prefix_tokens=32, turns=3, pause_s=1)
    requests = list(synthesize(constant(0.5), 20, shape, seed=1, block_size=16))
    by_thread = Counter(request.thread for request in requests)
    assert set(by_thread.values()) == {3}
    for thread in by_thread:
        first, second, third = (request for request in requests if request.thread == thread)
        assert (second.isl_tokens, third.isl_tokens) == (100 + 20 + 100, 340)
        assert second.names.startswith(first.names)
        assert third.names.startswith(second.names)
    assert len({request.names[:16] for request in requests}) == 2, "the two prefixes"


def test_slightly_late_rows_are_sorted_others_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    times = [*random.Random(1).sample(range(10_000), 3000)]
    path.write_text("\n".join(json.dumps({"timestamp": t, "input_length": 1, "hash_ids": []}) for t in times))
    assert [row.timestamp for row in stream_rows(path)] == sorted(times)
    times = [*range(10_000, 20_000), 5]
    path.write_text("\n".join(json.dumps({"timestamp": t, "input_length": 1, "hash_ids": []}) for t in times))
    with pytest.raises(ConfigError, match="sort the trace"):
        list(stream_rows(path))


# --- access logs ---------------------------------------------------------------------------------------------


def line(ts: str, took_ms: float, **fields: object) -> str:
    values = {"ts": ts, "message": "request", "status": 200, "path": "/v1/chat/completions", "duration_ms": took_ms}
    return json.dumps(values | fields)


def test_requests_of_an_access_log_arrive_when_they_began(tmp_path: Path) -> None:
    path = tmp_path / "frontend.log"
    path.write_text(
        "\n".join(
            [
                line("2026-01-01T00:00:10.000Z", 1000),
                "not json",
                line("2026-01-01T00:00:11.000Z", 9000),
                line("2026-01-01T00:00:12.000Z", 5, path="/metrics"),
                line("2026-01-01T00:00:13.000Z", 500, status=503),
                line("2026-01-01T00:00:14.000Z", 1000, isl_tokens=64, osl_tokens=9),
            ]
        )
    )
    requests = list(read_access_log(path, 16, osl_tokens=50, isl_tokens=320))
    assert [(r.arrival_s, r.isl_tokens, r.osl_tokens) for r in requests] == [(0, 320, 50), (7, 320, 50), (11, 64, 9)]
    assert len({r.names for r in requests}) == 3


def with_blocks(blocks: list[int], **fields: object) -> str:
    packed = b64encode(array("Q", blocks).tobytes()).decode()
    return line("2026-01-01T00:00:14.000Z", 1000, block_size=16, blocks=packed, **fields)


def test_prompts_of_an_access_log_share_what_they_shared(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    path.write_text("\n".join([with_blocks([1, 2, 3, 4], isl_tokens=70), with_blocks([1, 2, 5], isl_tokens=50)]))
    first, second = read_access_log(path, 16, osl_tokens=9)
    assert unpack_hashes(first.names).tolist() == [1, 2, 3, 4]
    assert unpack_hashes(second.names).tolist() == [1, 2, 5]
    coarse = [unpack_hashes(request.names).tolist() for request in read_access_log(path, 32, osl_tokens=9)]
    assert coarse == [[2, 4], [2]]


def test_blocks_that_a_log_left_out_are_shared_with_nobody(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    path.write_text("\n".join([with_blocks([1], isl_tokens=48)] * 2))
    first, second = (unpack_hashes(request.names).tolist() for request in read_access_log(path, 16, osl_tokens=9))
    assert len(first) == len(second) == 3
    assert set(first) & set(second) == {1}


def test_a_log_is_read_with_all_its_files(tmp_path: Path) -> None:
    """Two processes write it, and one of their files was set aside."""
    for name, second, isl in [("log.a.1", 10, 1), ("log.a", 12, 3), ("log.b", 11, 2)]:
        (tmp_path / name).write_text(line(f"2026-01-01T00:00:{second}.000Z", 1, isl_tokens=isl))
    assert [request.isl_tokens for request in read_access_log(tmp_path / "log", 16, osl_tokens=9)] == [1, 2, 3]


def test_bad_lines_of_a_log_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    good = line("2026-01-01T00:00:10.000Z", 1000, isl_tokens=64, osl_tokens=9)
    bad = [good[:40], "not json", line("soon", 5), line("2026-01-01T00:00:10.000Z", -5)]
    bad.append(line("2026-01-01T00:00:10.000Z", 5, isl_tokens=10**15))
    others = [line("2026-01-01T00:00:12.000Z", 5, path="/metrics"), line("2026-01-01T00:00:13.000Z", 500, status=503)]
    path.write_text("\n".join([good, *bad, *others, with_blocks([1], isl_tokens=48)]))
    counts = LineCounts()
    assert [request.isl_tokens for request in read_access_log(path, 16, osl_tokens=50, counts=counts)] == [64, 48]
    assert (counts.requests, counts.others, counts.bad) == (2, 2, 5)
    assert counts.text.startswith("2 requests; other lines: 2, bad lines: 5 (line 2: ")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}', "mooncake"),
        ('started\n{"ts": "t", "message": "ready"}\n' + line("2026-01-01T00:00:10.000Z", 5), "access-log"),
    ],
)
def test_a_trace_and_an_access_log_are_told_apart(tmp_path: Path, text: str, kind: str) -> None:
    (tmp_path / "file").write_text(text)
    assert kind_of(tmp_path / "file") == kind


@pytest.mark.parametrize("text", ["", "hello\n[1]\n", '{"a": 1}'])
def test_a_file_of_neither_format_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match="neither a trace nor an access log"):
        kind_of(tmp_path / "file")
    with pytest.raises(ConfigError, match="no trace at"):
        kind_of(tmp_path / "none")


def test_the_replay_takes_an_access_log_as_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "access.jsonl"
    path.write_text("\n".join([with_blocks([1], isl_tokens=48), "cut", with_blocks([1, 2], isl_tokens=48)]))
    assert main(["--trace", str(path), "--block-size", "16", "--workers", "1"]) == 0
    assert "the log has 2 requests; other lines: 0, bad lines: 1 (line 2: " in capsys.readouterr().out


def test_blocks_of_another_size_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    path.write_text(with_blocks([1], isl_tokens=48))
    with pytest.raises(ConfigError, match="--block-size 16"):
        list(read_access_log(path, 24, osl_tokens=9))


def test_a_log_without_requests_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "frontend.log"
    path.write_text(line("2026-01-01T00:00:10Z", 5, path="/health"))
    with pytest.raises(ConfigError, match="--access-log"):
        list(read_access_log(path, 16, 50))


# --- the command ---------------------------------------------------------------------------------------------


def test_one_source_of_requests_must_be_given() -> None:
    with pytest.raises(ConfigError, match="one of --trace"):
        requests_of(ReplayConfig())
    with pytest.raises(ConfigError, match="trace and load are given"):
        requests_of(ReplayConfig(trace="t", load="step"))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--mode", "disaggregated", "--workers", "1"], "one worker cannot be both"),
        (["--prefill-workers", "8"], "none is left to decode"),
        (["--profile", "/nowhere.json"], "no profile at"),
    ],
)
def test_contradicting_flags_are_refused(flags: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        main(["--load", "constant", *flags])


@pytest.mark.parametrize("name", ["constant", "diurnal", "bursty", "step", "sawtooth"])
def test_every_shape_can_be_had_by_flags(name: str) -> None:
    config = ReplayConfig(load=name, rate=2.0, duration_s=50, period_s=20, block_size=64)  # type: ignore[arg-type]
    assert rate_of(config).most_rps == pytest.approx(2.0 if name == "constant" else 3.2)
    assert len(list(requests_of(config))) > 10


def test_the_command_writes_a_page_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    flags = ["--load", "step", "--rate", "2", "--duration-s", "60", "--isl", "2000", "--osl", "20", "--json"]
    flags += ["--workers", "4", "--mode", "disaggregated", "--speedup", "2", "--blocks-per-worker", "200"]
    pages = [tmp_path / "a.html", tmp_path / "b.html"]
    pictures = [tmp_path / "a.png", tmp_path / "b.png"]
    for page, picture in zip(pages, pictures, strict=True):
        assert main([*flags, "--html", str(page), "--png", str(picture)]) == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert first == second
    assert json.loads(first)["ttft_p50_s"] > 0
    assert pages[0].read_bytes() == pages[1].read_bytes()
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    text = pages[0].read_text()
    assert "<svg" in text
    assert "http" not in text, "nothing is fetched from elsewhere"


def test_the_planner_can_be_put_in_the_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--load",
        "step",
        "--rate",
        "2",
        "--peak-rate",
        "12",
        "--duration-s",
        "300",
        "--isl",
        "4000",
        "--osl",
        "20",
    ]
    flags += ["--timeline", str(tmp_path / "line.json")]
    flags += ["--workers", "2", "--planner", "--start-s", "10", "--blocks-per-worker", "500"]
    for mode in ("disaggregated", "aggregated"):
        assert main([*flags, "--mode", mode, "--json"]) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert report["started"] > 0
        assert report["failed"] == 0
        assert json.loads((tmp_path / "line.json").read_text())["changes"][0]["why"]
    with pytest.raises(ConfigError, match="--profile instead of --prefill-rate"):
        main(["--load", "step", "--planner", "--prefill-rate", "1000"])


# --- values --------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=200), st.floats(0, 1))
def test_percentiles_are_exact_while_there_are_few(values: list[float], share: float) -> None:
    tally = PercentileTally()
    for value in values:
        tally.add(value)
    assert tally.percentile(share) == sorted(values)[min(len(values) - 1, int(len(values) * share))]
    assert (tally.count, tally.largest) == (len(values), max(values))


@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e4)), min_size=50, max_size=300), st.floats(0, 1))
def test_percentiles_of_many_values_are_right_to_half_a_percent(values: list[float], share: float) -> None:
    tally = PercentileTally(exact=10)
    for value in values:
        tally.add(value)
    exact = sorted(values)[min(len(values) - 1, int(len(values) * share))]
    assert tally.percentile(share) == pytest.approx(exact, rel=0.006)


def test_no_values_have_no_percentiles() -> None:
    assert (PercentileTally().percentile(0.5), PercentileTally().mean, PercentileTally().largest) == (0.0, 0.0, 0.0)
