"""Tests of the help of `kvmesh lab bench` and of each benchmark."""

import pytest

from kvmesh.lab.bench.__main__ import BENCHMARKS, main
from kvmesh.protocol.errors import ConfigError


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_the_help_lists_every_benchmark(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 90
    assert {line.split()[0] for line in lines[2:]} == set(BENCHMARKS)


@pytest.mark.parametrize("argv", [[name] for name in BENCHMARKS] + [["engine", "steps"], ["engine", "versus"]])
def test_each_benchmark_says_what_it_measures(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--help"])
    assert ended.value.code == 0
    usage, description, *_ = capsys.readouterr().out.split("\n\n")
    assert usage == f"usage: kvmesh lab bench {' '.join(argv)} [options]"
    assert len(description) > 80


def test_an_unknown_benchmark_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="did you mean frontend"):
        main(["frontent"])
