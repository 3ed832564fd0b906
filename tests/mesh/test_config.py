"""Settings: where a value comes from, and what is said about a wrong one."""

import enum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from kvmesh.frontend.config import FrontendConfig
from kvmesh.mesh.config import describe, load, load_given, to_flags, usage
from kvmesh.mesh.removed_settings import RemovedSettings, removed_settings
from kvmesh.planner.config import ServiceConfig
from kvmesh.protocol.errors import ConfigError
from kvmesh.router.config import RouterConfig
from kvmesh.workers.config import WorkerConfig


class Mode(enum.StrEnum):
    KV = "kv"
    RANDOM = "random"


class Settings(Struct, frozen=True, kw_only=True):
    block_size: Annotated[int, Meta(ge=1, description="tokens per KV block")] = 64
    prefill_weight: Annotated[float, Meta(ge=0, description="cache reuse against even load")] = 1.0
    verbose: Annotated[bool, Meta(description="say more")] = False
    name: Annotated[str, Meta(description="who I am")] = "router"
    policy: Annotated[Literal["kv", "round-robin"], Meta(description="how to choose")] = "kv"
    mode: Annotated[Mode, Meta(description="an enum")] = Mode.KV
    peers: Annotated[tuple[str, ...], Meta(description="addresses")] = ()
    ranks: Annotated[tuple[int, ...], Meta(description="numbers")] = (0,)
    token: Annotated[str | None, Meta(description="a secret")] = None
    limit: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="at most")] = 10
    tri: Annotated[bool | None, Meta(description="yes, no or as you like")] = None


class Required(Struct, frozen=True, kw_only=True):
    model_path: Annotated[str, Meta(description="folder of the model")]


def read(*argv: str, env: dict[str, str] | None = None, section: str | None = None) -> Settings:
    return load(
        Settings, argv, env or {}, prefix="KVMESH_ROUTER_", prog="kvmesh router", section=section,
        foreign=("KVMESH_ROUTER_HOME",),
    )  # fmt: skip


def toml(folder: Path, text: str) -> str:
    path = folder / "mesh.toml"
    path.write_text(text)
    return str(path)


def test_defaults_hold_where_nothing_is_given() -> None:
    assert read() == Settings()


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = toml(tmp_path, 'block_size = 1\nname = "file"\nprefill_weight = 3')
    got = read("--config", path, "--block-size=3", env={"KVMESH_ROUTER_BLOCK_SIZE": "2", "KVMESH_ROUTER_NAME": "env"})
    assert (got.block_size, got.name, got.prefill_weight, got.policy) == (3, "env", 3.0, "kv")


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    assert read(env={"KVMESH_ROUTER_CONFIG": toml(tmp_path, "block_size = 7")}).block_size == 7


def test_both_spellings_of_a_flag_are_understood() -> None:
    assert read("--block-size", "5") == read("--block-size=5") == Settings(block_size=5)


def test_the_last_of_repeated_flags_wins() -> None:
    assert read("--block-size=5", "--block-size=6").block_size == 6


def test_switches_are_turned_on_and_off() -> None:
    assert read("--verbose").verbose
    assert not read("--verbose", "--no-verbose").verbose
    assert read(env={"KVMESH_ROUTER_VERBOSE": "yes"}).verbose


def test_lists_come_with_commas_or_one_by_one() -> None:
    assert read("--peers=a:1,b:2", "--peers", "c:3").peers == ("a:1", "b:2", "c:3")
    assert read("--peers=[::1]:80").peers == ("[::1]:80",)
    assert read("--ranks=").ranks == ()
    assert read(env={"KVMESH_ROUTER_RANKS": "1, 2"}).ranks == (1, 2)


def test_what_somebody_gave_is_told_apart_from_defaults(tmp_path: Path) -> None:
    path = toml(tmp_path, "[router]\nblock_size = 64\n")
    argv, env = ["--config", path, "--verbose"], {"KVMESH_ROUTER_NAME": "router", "KVMESH_ROUTER_TOKEN": ""}
    found = load_given(Settings, argv, env, prefix="KVMESH_ROUTER_", prog="router", section="router")
    assert found == {"block_size": 64, "name": "router", "verbose": True}


def test_none_is_given_by_the_negated_flag() -> None:
    assert read("--no-limit").limit is None
    assert read("--limit=none").limit is None
    assert read("--token=none").token == "none"


def test_an_empty_environment_variable_counts_as_not_set() -> None:
    assert read(env={"KVMESH_ROUTER_BLOCK_SIZE": ""}).block_size == 64


def test_a_shared_file_has_a_table_per_service(tmp_path: Path) -> None:
    path = toml(tmp_path, "[router]\nblock_size = 9\n[frontend]\nport = 1")
    assert read("--config", path, section="router").block_size == 9
    assert read("--config", path, section="planner") == Settings()


def test_names_of_others_in_the_environment_are_left_alone() -> None:
    assert read(env={"KVMESH_ROUTER_HOME": "x", "KVMESH_WORKER_X": "y"}) == Settings()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--blok-size=5"], "unknown flag --blok-size; did you mean --block-size"),
        (["--xyzzy"], "unknown flag --xyzzy; see kvmesh router --help"),
        (["--no-block-size"], "unknown flag --no-block-size"),
        (["stray"], "unexpected argument 'stray'"),
        (["--block-size"], "--block-size needs a value"),
        (["--block-size", "--verbose"], "--block-size needs a value"),
        (["--no-verbose=1"], "--no-verbose takes no value; write --verbose=1"),
        (["--block-size=many"], "--block-size is 'many'; want INT"),
        (["--block-size=0"], "--block-size is '0'; want INT .*>= 1"),
        (["--policy=best"], "want {kv,round-robin}"),
        (["--mode=best"], "want {kv,random}"),
        (["--ranks=1,x"], "--ranks is '1,x'; want INT,..."),
        (["--verbose=maybe"], "--verbose is 'maybe'; want BOOL"),
        (["--config=/does/not/exist"], "cannot read --config /does/not/exist"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_named_with_what_would_do(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*argv)


def test_a_mistyped_environment_variable_is_an_error() -> None:
    with pytest.raises(ConfigError, match="KVMESH_ROUTER_BLOCKSIZE; did you mean KVMESH_ROUTER_BLOCK_SIZE"):
        read(env={"KVMESH_ROUTER_BLOCKSIZE": "1"})


def test_a_bad_environment_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="KVMESH_ROUTER_BLOCK_SIZE is 'x'"):
        read(env={"KVMESH_ROUTER_BLOCK_SIZE": "x"})


@pytest.mark.parametrize(
    ("text", "section", "message"),
    [
        ("blok_size = 1", None, "unknown setting 'blok_size' in .*did you mean block_size"),
        ("block_size = 'x'", None, "block_size in .* is 'x'; want INT"),
        ("block_size = ", None, "cannot read --config"),
        ("block_size = 1", "router", "is in no table; put it under .router"),
        ("[ruoter]\nblock_size = 1", "router", r"has a table \[ruoter\]; did you mean \[router\]"),
        ("[router]\nblok_size = 1", "router", "unknown setting 'blok_size'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, section: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read("--config", toml(tmp_path, text), section=section)


def test_a_required_option_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"--model-path is required .*KVMESH_WORKER_MODEL_PATH"):
        load(Required, [], {}, prefix="KVMESH_WORKER_", prog="kvmesh worker")


def test_help_shows_every_option_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        read("--block-size=0", "--help")
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    for row in describe(Settings, prefix="KVMESH_ROUTER_"):
        assert row.flag in shown
        assert row.env in shown


def test_help_lines_are_aligned_and_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = usage(Settings, prefix="KVMESH_ROUTER_", prog="x", description="Route.").splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("  --block-size INT ") and "tokens per KV block" in line for line in lines)


def test_clashing_and_unusable_fields_are_a_bug_of_the_schema() -> None:
    class Clash(Struct):
        config: Annotated[str, Meta(description="a file")] = ""

    class Nested(Struct):
        inner: Annotated[dict[str, str], Meta(description="a table")] = {}

    for schema in (Clash, Nested):
        with pytest.raises(TypeError):
            load(schema, [], {}, prefix="P_", prog="p")


texts = st.text(st.one_of(st.sampled_from(',[]" '), st.characters()))
settings = st.builds(
    Settings,
    block_size=st.integers(min_value=1),
    prefill_weight=st.floats(min_value=0, allow_nan=False),
    verbose=st.booleans(),
    name=st.text(),
    policy=st.sampled_from(["kv", "round-robin"]),
    mode=st.sampled_from(Mode),
    peers=st.lists(texts, max_size=3).map(tuple),
    ranks=st.lists(st.integers(), max_size=3).map(tuple),
    token=st.none() | st.text(),
    limit=st.none() | st.integers(min_value=1),
    tri=st.none() | st.booleans(),
)  # fmt: skip


@given(settings)
def test_to_flags_is_the_inverse_of_load(wanted: Settings) -> None:
    env = {"KVMESH_ROUTER_BLOCK_SIZE": "77", "KVMESH_ROUTER_TOKEN": "other"}
    assert read(*to_flags(wanted), env=env) == wanted


class Rules(Struct, frozen=True, kw_only=True):
    port: Annotated[int, Meta(description="port")] = 1
    patience_s: Annotated[float, Meta(gt=0)] = 2.0


def test_a_field_without_a_description_is_no_option() -> None:
    assert [row.flag for row in describe(Rules, prefix="X_")] == ["--port INT"]
    assert load(Rules, ["--port=3"], {}, prefix="X_", prog="x") == Rules(port=3)
    with pytest.raises(ConfigError, match="unknown flag --patience-s"):
        load(Rules, ["--patience-s=1"], {}, prefix="X_", prog="x")


def former(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = RemovedSettings(names=("pace_s",), switches=("eager",))
    monkeypatch.setattr("kvmesh.mesh.removed_settings.REMOVED", {"KVMESH_ROUTER_": removed})


@pytest.mark.parametrize(
    ("argv", "source"),
    [
        (["--pace-s=3"], "--pace-s"),
        (["--pace-s", "3"], "--pace-s"),
        (["--no-pace-s"], "--no-pace-s"),
        (["--eager"], "--eager"),
        (["--no-eager"], "--no-eager"),
    ],
)
def test_a_removed_flag_has_no_effect_and_one_warning(
    argv: list[str], source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    former(monkeypatch)
    assert read(*argv, "--block-size=3") == Settings(block_size=3)
    assert capsys.readouterr().err == (
        f"kvmesh router: {source}: no effect since kvmesh 0.3, and refused from 0.4: please remove\n"
    )


def test_removed_settings_of_environment_and_file_share_the_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    former(monkeypatch)
    path = toml(tmp_path, "eager = true")
    assert read("--config", path, env={"KVMESH_ROUTER_PACE_S": "soon"}) == Settings()
    [line] = capsys.readouterr().err.splitlines()
    assert f"eager in {path}, KVMESH_ROUTER_PACE_S: no effect" in line


def test_up_accepts_the_removed_settings_of_its_services(monkeypatch: pytest.MonkeyPatch) -> None:
    former(monkeypatch)
    assert removed_settings("KVMESH_UP_") == removed_settings("KVMESH_ROUTER_") != removed_settings("KVMESH_X_")


def test_no_setting_is_removed_and_there() -> None:
    schemas = {"KVMESH_WORKER_": WorkerConfig, "KVMESH_FRONTEND_": FrontendConfig, "KVMESH_ROUTER_": RouterConfig}
    for prefix, schema in {**schemas, "KVMESH_PLANNER_": ServiceConfig}.items():
        removed = {name for names in removed_settings(prefix) for name in names}
        assert removed.isdisjoint(row.env.removeprefix(prefix).lower() for row in describe(schema, prefix=prefix))


def test_a_long_value_is_shortened_in_its_error() -> None:
    with pytest.raises(ConfigError) as refused:
        read(f"--policy={'x' * 5000}")
    assert "5000 characters" in str(refused.value) and len(str(refused.value)) < 600


def test_bytes_that_are_no_text_are_refused() -> None:
    """An ASCII locale hands them over as surrogates."""
    with pytest.raises(ConfigError, match="--name is not UTF-8"):
        read("--name=m\udcc3\udcb6del")
