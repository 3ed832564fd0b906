"""The benchmark of KV memory compares two sides, and finds what is wrong with one."""

import json
from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("torch")

from kvmesh.kvcache.tiers.store import Payload
from kvmesh.lab.bench import kv, kv_engines
from kvmesh.protocol.errors import ConfigError, EngineError

SHORT = ["--isl-tokens", "64", "--rounds", "1", "--disk-mib", "64"]


def run(capsys: pytest.CaptureFixture[str]) -> kv.KvBenchReport:
    assert kv.main([*SHORT, "--json"]) == 0
    report: kv.KvBenchReport = kv.msgspec.convert(
        json.loads(capsys.readouterr().out.splitlines()[-1]), kv.KvBenchReport
    )
    return report


@pytest.mark.long
def test_both_sides_answer_alike_and_prompts_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys)
    assert (report.wrong_tokens, report.failed, report.over_limit_bytes) == (0, 0, 0)
    assert report.loaded_blocks > 0
    assert min(report.ttft_host_ms, report.ttft_disk_ms) > 0
    assert report.host_is_on


@pytest.mark.long
def test_wrong_bytes_fail_the_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load = kv.ThrottledStore.load

    def spoil(self: kv.ThrottledStore, addresses: Sequence[bytes], take: Callable[[Payload], object]) -> None:
        load(self, addresses, lambda payload: take(payload[::-1].copy()))

    monkeypatch.setattr(kv.ThrottledStore, "load", spoil)
    with pytest.raises(EngineError, match="an answer was wrong"):
        kv.main(SHORT)
    capsys.readouterr()


def test_an_unknown_model_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="tiny, llama-8b"):
        kv_engines.model_folder("no-such-model")
