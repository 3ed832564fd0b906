"""The command `kvmesh profile measure`: engines in this process, servers over HTTP, runs that are continued."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from kvmesh.profiler.__main__ import main
from kvmesh.profiler.commands.measure import (
    MeasureConfig,
    jobs_of,
    measure_all,
    progress_bar,
    take_points,
    until_stopped,
)
from kvmesh.profiler.endpoint import Known, MeasuredServer, StreamUsage, timeline_of
from kvmesh.profiler.grid import Point, PrefillPoint, WorkerLimits
from kvmesh.profiler.journal import Journal, Subject
from kvmesh.profiler.measure import MeasurePlan, Timeline, work_of
from kvmesh.protocol.errors import ConfigError, EngineError, InvalidRequestError, UnreachableError
from kvmesh.protocol.profile import read_profile
from kvmesh.protocol.timing import PolynomialTiming
from tests.support.fake_servers import OpenAiServer, VllmServer
from tests.support.paced_target import PacedTarget

LIMITS = WorkerLimits(context_tokens=512, total_kv_tokens=4096, max_num_seqs=4)
PLAN = MeasurePlan(prefill_points=3, context_points=2, batch_points=2, repeats=1, steps=4, warm_steps=2)
PREFILL = PrefillPoint(isl_tokens=5, ttft_s=0.1, spread=0.0, repeats=1)
SUBJECT = Subject(model="m", engine="e", mapping="tp1", target="t", settings="s")


async def run_points(target: PacedTarget, path: Path, subject: Subject = SUBJECT) -> list[Point]:
    progress = progress_bar(Console(quiet=True))
    row = progress.add_task("tp1: starting", total=None, points="")
    with Journal(path, subject) as journal:
        await take_points(target, PLAN, LIMITS, journal, progress, row)
        assert progress.tasks[row].finished
        return list(journal.points)


def rounded(point: Point) -> Point:
    """Clocks that began elsewhere differ in the last digits."""
    if isinstance(point, PrefillPoint):
        return replace(point, ttft_s=round(point.ttft_s, 9), spread=0.0)
    return replace(point, itl_s=round(point.itl_s, 9), spread=0.0)


# --- stopping and going on --------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", range(0, 12, 2))
async def test_a_run_that_dies_continues_at_the_next_point(tmp_path: Path, answers: int) -> None:
    timing = PolynomialTiming(LIMITS.total_kv_tokens)
    whole = await run_points(PacedTarget(timing, LIMITS), tmp_path / "whole.jsonl")
    dying = PacedTarget(timing, LIMITS)
    dying.fail_after = answers
    with pytest.raises(EngineError, match="the worker is gone"):
        await run_points(dying, tmp_path / "p.jsonl")
    with Journal(tmp_path / "p.jsonl", SUBJECT) as journal:
        before = list(journal.points)
    assert before == whole[: len(before)]
    again = PacedTarget(timing, LIMITS)
    found = await run_points(again, tmp_path / "p.jsonl")
    assert [rounded(point) for point in found] == [rounded(point) for point in whole]
    finished = PacedTarget(timing, LIMITS)
    await run_points(finished, tmp_path / "p.jsonl")
    assert finished.answers == 0


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    with Journal(path, SUBJECT) as journal:
        journal.add(PREFILL)
        journal.add(PREFILL)
    path.write_bytes(path.read_bytes()[:-7])
    with Journal(path, SUBJECT) as journal:
        assert journal.points == [PREFILL]
        journal.add(PREFILL)
    with Journal(path, SUBJECT) as journal:
        assert journal.points == [PREFILL, PREFILL]


def test_points_of_another_subject_are_kept_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    with Journal(path, SUBJECT) as journal:
        journal.add(PREFILL)
    other = Subject(model="other", engine="e", mapping="tp1", target="t", settings="s")
    with pytest.raises(ConfigError, match=r"of another run: model 'm' there, 'other' here.*--fresh"):
        Journal(path, other)
    with Journal(path, SUBJECT) as journal:
        assert journal.points == [PREFILL]
    with Journal(path, other, fresh=True) as journal:
        assert journal.points == []


def test_a_file_without_points_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("hello\n")
    with pytest.raises(ConfigError, match="holds no points"):
        Journal(tmp_path / "p.jsonl", SUBJECT)


# --- an engine in this process ----------------------------------------------------------------------------

SMALL = ["--prefill-points", "3", "--context-points", "2", "--batch-points", "2", "--repeats", "1"]
SMALL += ["--steps", "4", "--warm-steps", "2", "--num-blocks", "64", "--max-num-seqs", "4"]


@pytest.mark.parametrize("engine", ["mock", "torch"])
def test_an_engine_in_this_process_is_measured(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--engine", engine, "--device", "cpu", "--mock-speedup", "50", "--out-dir", str(tmp_path), *SMALL]
    assert main(["measure", *flags]) == 0
    path = Path(capsys.readouterr().out.strip())
    profile = read_profile(path)
    assert (profile.engine, profile.gpus, profile.total_kv_tokens) == (engine, 0, 1024)
    assert profile.prefill is not None
    assert profile.decode is not None
    assert min(profile.prefill.ttft_s) > 0
    assert min(min(row) for row in profile.decode.itl_s) >= 0
    assert profile.kv_bytes_per_token > 0
    assert "seed 0" in profile.notes
    assert path.with_suffix(".npz").exists()


async def test_ctrl_c_keeps_the_points_and_the_command_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for((), ("tp1",), tmp_path, engine="mock", num_blocks=64, mock_speedup=50)
    stop, journal = asyncio.Event(), tmp_path / "tp1.points.jsonl"

    async def stop_after_two_points() -> None:
        while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
            await asyncio.sleep(0)
        stop.set()

    watching = asyncio.create_task(stop_after_two_points())
    assert await until_stopped(config, stop, Console(quiet=True)) == 130
    await watching
    before = journal.read_bytes()
    assert before.count(b"\n") >= 3
    assert not (tmp_path / "tp1.json").exists()
    assert await until_stopped(config, asyncio.Event(), Console(quiet=True)) == 0
    assert journal.read_bytes().startswith(before)
    assert capsys.readouterr().out.strip() == str(tmp_path / "tp1.json")


def test_a_role_alone_has_one_table(tmp_path: Path) -> None:
    flags = ["--engine", "mock", "--mock-speedup", "50", "--out-dir", str(tmp_path), *SMALL]
    assert main(["--role", "prefill", *flags]) == 0
    assert main(["measure", "--role", "decode", *flags]) == 0
    assert read_profile(tmp_path / "tp1-prefill.json").decode is None
    assert read_profile(tmp_path / "tp1-decode.json").prefill is None


# --- servers ----------------------------------------------------------------------------------------------


STEP_S = 0.003


class SteppingServer(VllmServer):
    """Takes its time for each token, and tells in every event how many there are, where it is asked to."""

    async def stream(self, request: web.Request, body: dict[str, Any], prompt: list[int]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for count in range(1, body["max_tokens"] + 1):
            await asyncio.sleep(STEP_S)
            told: dict[str, Any] = {"choices": [{"index": 0, "text": "", "finish_reason": None}]}
            if body["stream_options"].get("continuous_usage_stats"):
                told["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": count}
            await response.write(f"data: {json.dumps(told)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def config_for(urls: Sequence[str], mappings: Sequence[str], folder: Path, **more: Any) -> MeasureConfig:
    return MeasureConfig(
        url=tuple(urls),
        mapping=tuple(mappings),
        out_dir=str(folder),
        prefill_points=3,
        context_points=2,
        batch_points=2,
        repeats=1,
        steps=4,
        warm_steps=2,
        max_num_seqs=4,
        **more,
    )


async def test_servers_are_measured_side_by_side(tmp_path: Path) -> None:
    servers = [SteppingServer(tells_events=False) for _ in range(2)]
    async with servers[0].running(), servers[1].running():
        config = config_for([server.url for server in servers], ["tp1", "dep2"], tmp_path)
        paths = await measure_all(config, Console(quiet=True))
    assert [path.name for path in paths] == ["tp1.json", "dep2.json"]
    profiles = [read_profile(path) for path in paths]
    for profile in profiles:
        assert profile.decode is not None
        assert max(max(row) for row in profile.decode.itl_s) >= STEP_S
    assert [(p.mapping, p.gpus, p.dp_size, p.engine) for p in profiles] == [
        ("tp1", 1, 1, "vllm"),
        ("dep2", 2, 2, "vllm"),
    ]
    assert profiles[0].total_kv_tokens == 16_000  # as its metrics tell
    lengths = [[len(body["prompt"]) for body in server.knobs.bodies] for server in servers]
    assert [told.count(16) for told in lengths] == [1 + 1, 1 + 2]  # one to wake it, then a prompt for every rank
    body = servers[0].knobs.bodies[-1]
    assert body["ignore_eos"]
    assert body["temperature"] == 0


async def test_only_decoding_prompts_repeat(tmp_path: Path) -> None:
    server = SteppingServer(tells_events=False)
    async with server.running():
        await measure_all(config_for([server.url], ["tp1"], tmp_path, context_tokens=300), Console(quiet=True))
        starts = [tuple(body["prompt"][:8]) for body in server.knobs.bodies if body["max_tokens"] == 1]
    assert len(set(starts)) == len(starts)


async def test_a_server_that_hides_its_cache_size_needs_flags(tmp_path: Path) -> None:
    server = OpenAiServer()
    async with server.running():
        with pytest.raises(ConfigError, match="does not tell what --context-tokens says"):
            await measure_all(config_for([server.url], ["tp1"], tmp_path), Console(quiet=True))


async def test_a_server_that_stops_early_is_not_measured(tmp_path: Path) -> None:
    server = VllmServer(tells_events=False)
    server.knobs.stop_after = 2
    async with server.running():
        with pytest.raises(EngineError, match=r"answered 2 tokens instead of \d+; it must obey ignore_eos"):
            await measure_all(config_for([server.url], ["tp1"], tmp_path), Console(quiet=True))


async def test_a_servers_refusal_is_reported(tmp_path: Path) -> None:
    server = VllmServer(tells_events=False)
    async with server.running():
        server.knobs.refuse_with = (400, {"error": {"message": "no such thing", "code": 400}})
        with pytest.raises(InvalidRequestError, match="no such thing"):
            await measure_all(config_for([server.url], ["tp1"], tmp_path), Console(quiet=True))
        server.knobs.refuse_with = None
        server.knobs.fail_after = 0
        with pytest.raises(EngineError, match="it broke"):
            await measure_all(config_for([server.url], ["tp1"], tmp_path), Console(quiet=True))


async def test_an_unreachable_server_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1"):
        await measure_all(config_for(["http://127.0.0.1:1"], ["tp1"], tmp_path), Console(quiet=True))


async def test_the_key_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = SteppingServer(tells_events=False)
    server.knobs.api_key = "secret"
    monkeypatch.setenv("KVMESH_PROFILE_API_KEY", "secret")
    async with server.running():
        assert await measure_all(config_for([server.url], ["tp1"], tmp_path), Console(quiet=True))


async def test_a_measured_server_closes_twice() -> None:
    endpoint = MeasuredServer("http://127.0.0.1:1/v1", "", Known())
    assert endpoint.url == "http://127.0.0.1:1"
    await endpoint.close()
    await endpoint.close()


# --- what a stream tells ----------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30))
def test_token_counts_of_the_server_win_over_events(counts: list[int]) -> None:
    told = [sum(counts[: i + 1]) for i in range(len(counts))]
    usage = StreamUsage(prompt_tokens=7, completion_tokens=told[-1])
    times = [float(i) for i in range(len(told))]
    timeline = timeline_of(0.0, [*times, 99.0], [*told, told[-1]], usage, told[-1])
    assert timeline == Timeline(sent_s=0.0, at_s=times, tokens=[float(n) for n in told], prompt_tokens=7)


@given(st.integers(1, 50), st.integers(1, 200))
def test_without_counts_each_event_brings_its_share(events: int, tokens: int) -> None:
    usage = StreamUsage(prompt_tokens=7, completion_tokens=tokens)
    timeline = timeline_of(0.0, [float(i) for i in range(events)], [None] * events, usage, tokens)
    assert timeline.tokens[-1] == pytest.approx(tokens)
    assert len(timeline.tokens) == events


def test_a_stream_without_usage_is_refused() -> None:
    with pytest.raises(EngineError, match="without tokens or without usage"):
        timeline_of(0.0, [1.0], [None], None, 1)


# --- flags ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (MeasureConfig(url=("http://a", "http://b")), "2 --url, 0 --mapping"),
        (MeasureConfig(url=("http://a", "http://b"), mapping=("tp1", "tp1")), "a mapping is given twice: tp1, tp1"),
        (MeasureConfig(mapping=("tp1", "tp2")), "several mappings of one engine in this process"),
        (MeasureConfig(url=("localhost:8000",)), "'localhost:8000' is no URL of a server"),
        (MeasureConfig(url=("http://a",), mapping=("pp2",)), "no mapping 'pp2'"),
    ],
)
async def test_settings_that_do_not_fit_together_are_refused(config: MeasureConfig, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        jobs_of(config)


def test_unknown_commands_and_flags_list_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"unknown command 'nonsense'.*measure, estimate, plan, import"):
        main(["nonsense"])
    with pytest.raises(ConfigError, match="--repeats"):
        main(["measure", "--repeat", "3"])
    assert main([]) == 0
    assert "estimate" in capsys.readouterr().out


def test_the_plan_stays_within_the_worker() -> None:
    work = work_of(PLAN, LIMITS)
    assert 1 <= len(work.prefill) <= 3
    assert 1 <= len(work.decode) <= 4
    assert work.tokens > 0
