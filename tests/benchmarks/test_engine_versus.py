"""The torch engine beside vLLM: what is compared, and that our side answers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

pytest.importorskip("torch")

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.lab.bench import engine_versus
from kvmesh.lab.bench.engine_steps import PARTS, SHAPES, parts_of
from kvmesh.lab.bench.engine_versus import (
    OURS,
    PYTHON,
    THEIRS,
    EngineVersusConfig,
    RunningSide,
    VersusMeasured,
    VersusResults,
    VersusRun,
    check_memory,
    main,
    ratio,
    read_results,
    report_of,
    room_gib,
    side_environment,
    step_model,
    write_checkpoint,
)
from kvmesh.protocol.errors import ConfigError, EngineError


def test_a_ratio_is_the_median_of_pairs() -> None:
    assert ratio([2.0, 9.0, 1.0], [1.0, 1.0, 1.0]) == 2.0


def test_without_vllm_the_error_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    with pytest.raises(ConfigError, match=PYTHON):
        main([])


def test_an_unknown_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="int4"):
        main(["--dtypes", "float32,int4"])


class FakeSide:
    """A side whose work takes a given time, on a clock that the sides share."""

    clock_s = 0.0
    asked: list[str]

    def __init__(self, name: str, python: str, folder: Path, dtype: str, isl_tokens: int) -> None:
        self.name = name
        self.ready_s = {OURS: 2.0, THEIRS: 8.0}[name]

    def ask(self, work: str) -> float:
        FakeSide.asked.append(f"{self.name} {work}")
        FakeSide.clock_s += 1.0
        return {OURS: 1.0, THEIRS: 3.0}[self.name]

    def rss_bytes(self) -> int:
        return {OURS: 3, THEIRS: 4}[self.name]

    def close(self) -> None:
        FakeSide.asked.append(f"{self.name} ended")


@pytest.fixture
def fake_sides(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    FakeSide.clock_s, FakeSide.asked = 0.0, []
    monkeypatch.setattr(engine_versus, "RunningSide", FakeSide)
    monkeypatch.setattr(engine_versus, "write_checkpoint", lambda *_: None)
    monkeypatch.setattr(engine_versus, "read_rate", lambda *_: 1e12)
    monkeypatch.setattr(engine_versus, "check_memory", lambda *_: None)
    return FakeSide.asked


def run(config: EngineVersusConfig, results: VersusResults, until_s: float) -> None:
    versus = VersusRun(config, "float32", results, until_s, Console(quiet=True), lambda: FakeSide.clock_s)
    versus.measure("python")


def test_sides_take_turns_and_the_first_pair_is_not_counted(fake_sides: list[str]) -> None:
    config = EngineVersusConfig(rounds=2)
    results = VersusResults(shape=config.shape, isl_tokens=config.isl_tokens)
    run(config, results, 1e9)
    prefills = [each.split()[0] for each in fake_sides if each.endswith(" prefill")]
    assert prefills == [THEIRS, OURS, THEIRS, OURS, OURS, THEIRS]
    report = report_of(config, "float32", results.dtypes["float32"])
    assert (report.prefill_ratio, report.decode_ratio_32) == (3.0, 3.0)
    assert (report.rss_ratio, report.ready_s_ratio) == (0.75, 0.25)
    assert fake_sides[-2:] == [f"{OURS} ended", f"{THEIRS} ended"]


def test_a_run_without_time_is_continued_by_the_next(fake_sides: list[str], tmp_path: Path) -> None:
    config = EngineVersusConfig(rounds=2, results=str(tmp_path / "results.json"))
    run(
        config, read_results(config), 9.0
    )  # two seconds for a pair: of two works one that is not counted and one that is
    found = read_results(config)
    assert sum(len(pairs.torch) for pairs in found.dtypes["float32"].work_s.values()) == 2
    assert report_of(config, "float32", found.dtypes["float32"]).decode_ratio_32 is None
    FakeSide.clock_s = 0.0
    run(config, found, 1e9)
    assert all(len(pairs.vllm) == 2 for pairs in read_results(config).dtypes["float32"].work_s.values())
    fake_sides.clear()
    run(config, read_results(config), 1e9)
    assert fake_sides == []  # all pairs are there: nothing is started


def test_results_of_another_measurement_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(msgspec.json.encode(VersusResults(shape="other", isl_tokens=512)))
    with pytest.raises(ConfigError, match="other with 512 tokens"):
        read_results(EngineVersusConfig(results=str(path)))
    one_sided = VersusMeasured()
    one_sided.work_s["prefill"].torch.append(1.0)
    path.write_bytes(
        msgspec.json.encode(VersusResults(shape="qwen3-0.6b", isl_tokens=512, dtypes={"float32": one_sided}))
    )
    with pytest.raises(ConfigError, match="one side"):
        read_results(EngineVersusConfig(results=str(path)))
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no results"):
        read_results(EngineVersusConfig(results=str(path)))


def test_a_share_above_one_is_an_error_after_the_results(
    fake_sides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv(PYTHON, "python")
    monkeypatch.setattr(engine_versus, "read_rate", lambda *_: 1e6)
    try:
        with pytest.raises(EngineError, match="less than reading its weights"):
            main(["--dtypes", "float32", "--rounds", "1", "--json"])
    finally:
        signal.signal(signal.SIGTERM, before)
    last = capsys.readouterr().out.splitlines()[-1]
    assert msgspec.json.decode(last)["float32"]["decode_ratio_8"] == 3.0


@pytest.mark.long
def test_a_terminated_run_leaves_no_process_and_no_checkpoint(tmp_path: Path) -> None:
    """The stand-in for vLLM's Python never says that it is ready."""
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\necho $$ > $(dirname $0)/pid\nsleep 600 & wait\n")
    stuck.chmod(0o755)
    command = ["kvmesh.lab.bench.engine", "versus", "--shape", str(CHECKPOINT_DIR), "--dtypes", "float32"]
    code = "import sys; from importlib import import_module as i; sys.exit(i(sys.argv.pop(1)).main(sys.argv[1:]))"
    environ = os.environ | {PYTHON: str(stuck), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code, *command], env=environ) as running:
        try:
            limit_s = time.monotonic() + 120
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                assert running.poll() is None
                assert time.monotonic() < limit_s
                time.sleep(0.05)
            group = int((tmp_path / "pid").read_text())
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 128 + signal.SIGTERM
        finally:
            running.kill()
    left = [p for p in psutil.process_iter() if p.status() != psutil.STATUS_ZOMBIE and os.getpgid(p.pid) == group]
    assert left == []
    assert list(tmp_path.glob("kvmesh-versus-*")) == []


def test_both_have_room_for_the_largest_batch() -> None:
    gib = room_gib(step_model(SHAPES / "qwen3-0.6b", "bfloat16"), 512)
    assert gib == 3  # 36 sequences of 576 tokens, 112 KiB each
    assert side_environment(THEIRS, gib)["VLLM_CPU_KVCACHE_SPACE"] == "3"


def test_without_room_for_both_nothing_is_started() -> None:
    model = step_model(SHAPES / "qwen3-0.6b", "float32")
    check_memory(model, 512, 16 * 2**30)
    with pytest.raises(EngineError, match=r"14\.\d GiB, 10\.0 GiB are free"):
        check_memory(model, 512, 10 * 2**30)


@pytest.mark.long
def test_our_side_loads_the_written_checkpoint_and_answers(tmp_path: Path) -> None:
    write_checkpoint(CHECKPOINT_DIR, tmp_path, "float32")
    side = RunningSide(OURS, sys.executable, tmp_path, "float32", 16)
    try:
        assert side.ask("prefill") > 0
        assert side.ask("decode_8") > 0
        assert side.rss_bytes() > 0
    finally:
        side.close()


def test_a_side_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((CHECKPOINT_DIR / "config.json").read_bytes())
    with pytest.raises(EngineError, match=r"model\.safetensors is missing"):
        RunningSide(OURS, sys.executable, tmp_path, "float32", 16)


def test_the_parts_of_a_step_are_shares_of_it() -> None:
    import torch

    parts = parts_of(lambda: torch.nn.functional.linear(torch.ones(64, 512), torch.ones(512, 512)))
    assert set(parts) == {*PARTS, "python"}
    assert sum(parts.values()) == pytest.approx(1, abs=0.01)
    assert parts["projections"] > 0
