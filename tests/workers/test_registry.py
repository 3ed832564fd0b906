"""The registry of engines: what it says of each is true, and its readers need no other list."""

import re
from importlib import import_module

import msgspec
import pytest

from kvmesh.mesh.config import describe
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.kind import EngineKind
from kvmesh.workers.engines.opening import check_settings
from kvmesh.workers.engines.registry import ENGINES, OPTIONAL, STARTED, takers


@pytest.mark.parametrize("kind", ENGINES.values(), ids=ENGINES)
def test_every_engine_has_a_folder_with_an_opener(kind: EngineKind) -> None:
    assert callable(import_module(kind.opening).open_engine)


def test_optional_settings_are_settings_of_a_worker() -> None:
    assert set(OPTIONAL) <= set(WorkerConfig.__struct_fields__)
    assert all(kind.takes <= set(OPTIONAL) for kind in ENGINES.values())
    assert all(takers(setting) for setting in OPTIONAL)


def test_help_names_the_engines_that_read_an_optional_setting() -> None:
    rows = {row.flag.split()[0]: row.help for row in describe(WorkerConfig, prefix="")}
    for setting in OPTIONAL:
        text = rows["--" + setting.replace("_", "-")]
        for kind in ENGINES.values():
            assert (setting in kind.takes) is (kind.name in re.split(r"\W+", text)), (setting, kind.name)


def test_settings_take_the_registered_engines_and_no_others() -> None:
    for name in ENGINES:
        assert msgspec.convert({"model_path": "m", "engine": name}, WorkerConfig).engine == name
    with pytest.raises(msgspec.ValidationError, match="engine"):
        msgspec.convert({"model_path": "m", "engine": "abacus"}, WorkerConfig)


def test_an_attached_server_is_the_only_engine_that_runs_already() -> None:
    assert set(ENGINES) - set(STARTED) == {"attach"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [("dp_size", 2), ("count", 2), ("loras", "poet=/x"), ("kv_connector", "nixl"), ("engine_args", "--seed 1")],
)
def test_an_engine_refuses_a_setting_that_it_does_not_read(setting: str, value: object) -> None:
    flag = "--" + setting.replace("_", "-")
    for name, kind in ENGINES.items():
        settings = msgspec.convert({"model_path": "m", "engine": name, setting: value}, WorkerConfig)
        if setting in kind.takes:
            check_settings(settings, kind)
            continue
        with pytest.raises(ConfigError, match=f"{flag} is for {takers(setting)}, not for --engine {name}; "):
            check_settings(settings, kind)


def test_a_role_that_the_engine_lacks_is_refused() -> None:
    kind = EngineKind(name="one", title="one", summary="", features=(), roles=(Role.AGGREGATED,))
    with pytest.raises(ConfigError, match="--engine one has no role prefill; set --role aggregated"):
        check_settings(WorkerConfig(model_path="m", role=Role.PREFILL), kind)
