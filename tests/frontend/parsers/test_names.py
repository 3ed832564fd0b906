"""The names of parsers are the same for workers, which name one, and for frontends, which have them."""

import pytest

from kvmesh.frontend.formats import answer_format
from kvmesh.frontend.parsers import reasoning, tools
from kvmesh.mesh.config import describe, load
from kvmesh.protocol import parsers
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.parsers import reasoning_parser_name, tool_parser_name
from kvmesh.workers.config import WorkerConfig


def test_frontends_have_a_parser_for_every_name() -> None:
    assert set(tools.TOOL_PARSERS) == set(parsers.TOOL_PARSERS)
    assert set(reasoning.REASONING_PARSERS) == set(parsers.REASONING_PARSERS)


@pytest.mark.parametrize("name", ["", "none", "harmony", "gpt-oss", "Qwen3", *parsers.TOOL_PARSERS])
def test_every_name_of_a_tool_parser_opens(name: str) -> None:
    answer_format(tool_parser_name(name), "", "")


@pytest.mark.parametrize("name", ["", "none", "harmony", "gpt-oss", "QwQ", *parsers.REASONING_PARSERS])
def test_every_name_of_a_reasoning_parser_opens(name: str) -> None:
    answer_format("", reasoning_parser_name(name), "")


@pytest.mark.parametrize("option", ["tool", "reasoning"])
def test_a_worker_does_not_start_with_an_unknown_parser(option: str) -> None:
    argv = ["--model-path", "x", f"--{option}-parser", "foo"]
    with pytest.raises(ConfigError, match=f"no {option} parser is named 'foo'; use one of .*glm45.*, or none"):
        load(WorkerConfig, argv, {}, prefix="KVMESH_WORKER_", prog="worker")


@pytest.mark.parametrize(
    ("option", "names"), [("tool", parsers.TOOL_PARSERS), ("reasoning", parsers.REASONING_PARSERS)]
)
def test_the_help_of_a_worker_lists_the_parsers(option: str, names: tuple[str, ...]) -> None:
    [row] = [row for row in describe(WorkerConfig, prefix="KVMESH_") if row.flag.startswith(f"--{option}-parser")]
    assert ", ".join(names) in row.help
