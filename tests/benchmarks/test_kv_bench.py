"""The benchmark of KV memory compares two sides, and finds what is wrong with one."""

import json

import pytest

pytest.importorskip("torch")

from benchmarks import kv
from protocol.errors import ConfigError, EngineError


def run(capsys: pytest.CaptureFixture[str]) -> kv.KvBenchReport:
    assert kv.main(["--isl-tokens", "64", "--rounds", "1", "--json"]) == 0
    report: kv.KvBenchReport = kv.msgspec.convert(
        json.loads(capsys.readouterr().out.splitlines()[-1]), kv.KvBenchReport
    )
    return report


@pytest.mark.long
def test_both_sides_answer_alike_and_prompts_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys)
    assert (report.wrong_tokens, report.failed, report.over_limit_bytes) == (0, 0, 0)
    assert report.loaded_blocks > 0
    assert report.ttft_host_ms > 0


@pytest.mark.long
def test_wrong_bytes_fail_the_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load = kv.ThrottledStore.load

    def spoil(self: kv.ThrottledStore, address: bytes, take: "kv.Callable[[kv.Payload], object]") -> None:
        load(self, address, lambda payload: take(payload[::-1].copy()))

    monkeypatch.setattr(kv.ThrottledStore, "load", spoil)
    with pytest.raises(EngineError, match="an answer was wrong"):
        kv.main(["--isl-tokens", "64", "--rounds", "1"])
    capsys.readouterr()


def test_an_unknown_model_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="tiny, llama-8b"):
        kv.model_folder("no-such-model")
