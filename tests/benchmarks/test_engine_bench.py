"""The engine benchmarks: what a step must do at least, what the mesh adds to vLLM, and that they run."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.lab.bench.__main__ import main
from kvmesh.lab.bench.engine import (
    BARE,
    GOALS,
    KVMESH,
    EngineBenchConfig,
    EngineBenchReport,
    EngineRounds,
    Side,
    environment,
    load_on,
    other_python,
    report_of,
)
from kvmesh.lab.bench.engine_steps import SHAPES, StepModel
from kvmesh.lab.bench.load import ClientWaits, LoadOutcome
from kvmesh.protocol.errors import ConfigError, EngineError
from kvmesh.protocol.messages import KvLayout
from kvmesh.workers.executor import ModelInfo
from tests.support.vllm_mesh import needs_vllm


def shape_of(folder: Path) -> StepModel:
    layout = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=64, dtype="bfloat16")
    return StepModel.of(folder, ModelInfo(layout, 8192, 128256, ()))


def test_an_8b_model_has_its_known_sizes() -> None:
    shape = shape_of(SHAPES / "llama-8b")
    embeddings = shape.head_params  # as many again, which no step multiplies with
    assert 7.9e9 < shape.matrix_params + shape.head_params + embeddings < 8.1e9
    assert shape.kv_bytes_per_token == 128 * 1024


def test_a_steps_least_work_is_counted() -> None:
    shape = shape_of(SHAPES / "llama-8b")
    assert shape.prefill_flops(1) == pytest.approx(2 * (shape.matrix_params + shape.head_params), rel=1e-3)
    assert shape.prefill_flops(2048) > 2048 * 2 * shape.matrix_params
    assert shape.decode_bytes(0, 1000) == shape.weight_bytes
    assert shape.decode_bytes(3, 100) - shape.weight_bytes == 300 * 128 * 1024


def test_engine_steps_run_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--isl-tokens", "40", "--batch", "2", "--context-tokens", "30", "--block-size", "16", "--rounds", "1"]
    with suppress(EngineError):  # a busy machine measured rates that contradict each other: the report is there
        assert main(["engine", "steps", "--shape", str(CHECKPOINT_DIR), "--device", "cpu", "--json", *flags]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["prefill_tokens_s"] > 0
    assert report["decode_tokens_s"] > 0


# --- beside the bare vLLM -----------------------------------------------------------------------------------

CONFIG = EngineBenchConfig(osl_tokens=10)


def outcome(requests: int, wall_s: float, *, failures: int = 0, **alone_s: float) -> LoadOutcome:
    """The engine has used 2 s besides."""
    cpu_s = 2.0 + sum(alone_s.values())
    return LoadOutcome(requests, cpu_s, wall_s, 0.5 * wall_s, [], [], ["lost"] * failures, alone_s)


def waits(*ttft_ms: float | None) -> ClientWaits:
    seconds = [None if value is None else value / 1000 for value in ttft_ms]
    return ClientWaits(seconds, seconds, ["lost" for value in ttft_ms if value is None])


def measured(ours: ClientWaits, bare: ClientWaits) -> EngineRounds:
    rounds = {
        KVMESH: [outcome(10, 2.0, frontend=0.1, worker=0.3), outcome(10, 1.0), outcome(10, 4.0, failures=1)],
        BARE: [outcome(10, 1.0, server=0.4), outcome(10, 1.0), outcome(10, 3.6)],
    }
    return EngineRounds(rounds, {KVMESH: ours, BARE: bare})


def test_throughput_is_compared_round_by_round_and_the_median_counts() -> None:
    report = report_of(CONFIG, measured(waits(1), waits(1)))
    assert report.throughput_ratios == [0.5, 1.0, 0.9]
    assert report.throughput_ratio == 0.9
    assert (report.kvmesh.tokens_s, report.bare.tokens_s) == (50.0, 100.0)
    assert report.others_cores == 0.5


def test_added_latency_is_the_median_difference_of_answered_pairs() -> None:
    report = report_of(CONFIG, measured(waits(10, 20, None, 90), waits(9, 22, 5, 50)))
    assert report.added_ttft_p50_ms == report.added_itl_p50_ms == pytest.approx(1.0)
    assert report.kvmesh.ttft_p50_ms == pytest.approx(20)
    assert report.errors == 2


def test_cpu_is_split_by_process_the_remainder_is_the_engine() -> None:
    report = report_of(CONFIG, measured(waits(1), waits(1)))
    tokens = 3 * 10 * 10
    assert report.kvmesh.cpu_us_per_token == {
        "frontend": round(0.1e6 / tokens, 1),
        "worker": round(0.3e6 / tokens, 1),
        "engine": round(6e6 / tokens, 1),
    }
    assert report.bare.cpu_us_per_token["engine"] == round(6e6 / tokens, 1)


def test_without_answers_there_is_no_figure() -> None:
    report = report_of(CONFIG, measured(waits(None), waits(5)))
    assert (report.added_ttft_p50_ms, report.kvmesh.ttft_p50_ms, report.bare.ttft_p50_ms) == (None, None, 5)


def test_both_sides_are_sent_the_same_and_no_prompt_twice() -> None:
    sides = [Side("http://a:1", {"frontend": 1, "worker": 2}), Side("http://b:1", {"server": 3})]
    ours, bare = (load_on(CONFIG, side, 1, 6, 2) for side in sides)
    assert ours.bodies == bare.bodies
    assert len({*ours.bodies, *load_on(CONFIG, sides[0], 2, 6, 2).bodies}) == 16
    assert (ours.more_pids, bare.more_pids) == ((1, 2), (3,))
    body = json.loads(ours.bodies[0])
    assert (body["temperature"], body["ignore_eos"], body["max_tokens"], body["stream"]) == (0, True, 10, True)


def test_without_vllm_it_runs_elsewhere_or_says_what_to_install() -> None:
    assert other_python({"KVMESH_VLLM_PYTHON": "/v/python"}, True) == ""
    assert other_python({"KVMESH_VLLM_PYTHON": "/v/python"}, False) == "/v/python"
    with pytest.raises(ConfigError, match=r"no vLLM .*make .venv-vllm/.installed.*KVMESH_VLLM_PYTHON"):
        other_python({}, False)


def test_a_python_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_VLLM_PYTHON", "/nowhere/python")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="/nowhere/python"):
        main(["engine"])


def test_both_sides_have_the_environment_of_a_worker() -> None:
    eager = environment("--enforce-eager --seed 1", 8)
    assert (eager["OMP_NUM_THREADS"], eager["TORCHDYNAMO_DISABLE"]) == ("4", "1")
    assert "TORCHDYNAMO_DISABLE" not in environment("--seed 1", 1)


@needs_vllm
@pytest.mark.timeout(600)
def test_the_engine_benchmark_compares_two_real_sides(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--rounds", "1", "--requests", "4", "--pairs", "2", "--osl-tokens", "8", "--isl-tokens", "16"]
    assert main(["engine", "--json", *flags]) == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert set(report) == {*EngineBenchReport.__struct_fields__} >= {*GOALS}
    assert report["errors"] == 0
    assert report["throughput_ratio"] > 0
    assert report["added_ttft_p50_ms"] is not None
    assert set(report["kvmesh"]["cpu_us_per_token"]) == {"frontend", "worker", "engine"}
    assert set(report["bare"]["cpu_us_per_token"]) == {"server", "engine"}


# --- the whole ----------------------------------------------------------------------------------------------


def test_an_unknown_shape_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="llama-8b"):
        main(["engine", "steps", "--shape", "nonsense"])
    with pytest.raises(ConfigError, match="engine"):
        main(["nonsense"])
