"""`--help` shows the settings that people use, `--help-all` shows all."""

import re

import msgspec
import pytest

from kvmesh.cluster.config import load_cluster
from kvmesh.frontend.config import FrontendConfig
from kvmesh.mesh.config import common_names, describe, load
from kvmesh.planner.config import ServiceConfig
from kvmesh.protocol.errors import ConfigError
from kvmesh.router.config import RouterConfig
from kvmesh.workers.config import WorkerConfig

SERVICES = (WorkerConfig, FrontendConfig, RouterConfig, ServiceConfig)
MOST_SHOWN = 45


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)) - {"--config", "--help", "--help-all"}


def help_of_up(flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        load_cluster([flag], {})
    return capsys.readouterr().out


@pytest.mark.parametrize("schema", SERVICES)
def test_the_settings_that_help_shows_exist(schema: type[msgspec.Struct]) -> None:
    names = common_names(schema)
    assert set(names) <= set(schema.__struct_fields__)
    assert len(names) == len(set(names)) <= MOST_SHOWN


def test_help_of_up_shows_the_settings_that_people_use(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of_up("--help", capsys)
    assert {"--port", "--model-path", "--engine", "--max-num-seqs", "--api-keys-file", "--policy"} <= flags_in(text)
    assert len(flags_in(text)) <= MOST_SHOWN
    assert "`kvmesh up --help-all` lists all options" in text


def test_help_all_of_up_shows_the_rest_too(capsys: pytest.CaptureFixture[str]) -> None:
    shown = flags_in(help_of_up("--help", capsys))
    text = help_of_up("--help-all", capsys)
    assert shown < flags_in(text)
    assert "lists all options" not in text


@pytest.mark.parametrize("schema", SERVICES)
def test_help_all_of_a_service_shows_every_setting(
    schema: type[msgspec.Struct], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load(schema, ["--help-all"], {}, prefix="KVMESH_X_", prog="kvmesh x")
    rows = describe(schema, prefix="KVMESH_X_")
    assert flags_in(capsys.readouterr().out) == {row.flag.split()[0] for row in rows}


def test_a_required_setting_is_among_those_that_help_shows() -> None:
    for schema in SERVICES:
        required = {f.name for f in msgspec.structs.fields(schema) if f.required}
        assert required <= set(common_names(schema))


def test_a_setting_that_help_does_not_show_is_accepted() -> None:
    assert load_cluster(["--stall-timeout-s=0.5"], {}).worker == {"stall_timeout_s": 0.5}
    with pytest.raises(ConfigError, match="did you mean --stall-timeout-s"):
        load_cluster(["--stall-timeout=0.5"], {})
