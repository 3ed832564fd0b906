"""The files of `kvmesh profile plan` can be read by compose, Kubernetes and our own services."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvmesh.lab.bench.engine_steps import SHAPES
from kvmesh.mesh.config import load
from kvmesh.planner.config import ServiceConfig
from kvmesh.profiler.__main__ import main
from kvmesh.profiler.commands.plan import table_of
from kvmesh.profiler.deployment.yaml_files import to_yaml
from kvmesh.profiler.picks import Goal, Option, Picks
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from kvmesh.protocol.profile import PrefillTable, Profile, read_profile
from kvmesh.workers.config import WorkerConfig
from tests.support.chart import container_of, flags_of, needs_helm, rendered

ROOT = Path(__file__).parent.parent.parent
FLAGS = ["--isl", "3000", "--osl", "300", "--ttft-slo-s", "0.5", "--itl-slo-s", "0.02", "--gpus", "8"]


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiles")
    mappings = ["--mapping", "tp1", "--mapping", "tp2"]
    assert main(["estimate", "--model-path", str(SHAPES / "llama-8b"), "--out-dir", str(folder), *mappings]) == 0
    return folder


@pytest.fixture(scope="module")
def plan(profiles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    assert (
        main(["plan", "--profiles", str(profiles), "--out-dir", str(folder), "--model-path", "/models/8b", *FLAGS]) == 0
    )
    return folder


def recommended(plan: Path) -> dict[str, Any]:
    read = json.loads((plan / "plan.json").read_text())
    option: dict[str, Any] = read["options"][read["recommended"]]
    return option


# --- compose ----------------------------------------------------------------------------------------------


def test_the_override_fits_over_our_compose_file(plan: Path) -> None:
    override = yaml.safe_load((plan / "compose.override.yml").read_text())["services"]
    base = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert set(override) == {"prefill", "decode", "planner", "frontend", "router"}
    assert set(override) <= set(base)
    option = recommended(plan)
    for role in ("prefill", "decode"):
        assert override[role]["scale"] == option[f"{role}_workers"]
        gpus = override[role]["deploy"]["resources"]["reservations"]["devices"][0]["count"]
        assert gpus == int(option[f"{role}_mapping"].removeprefix("tp"))
        assert any(":/models/8b:ro" in volume for volume in override[role]["volumes"])
        assert override[role].keys() >= {"mem_limit", "cpus"}, "the limits of the tiny model's workers would stay"


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="needs docker-compose; no daemon")
def test_compose_reads_the_files_together(plan: Path) -> None:
    names = [ROOT / "docker-compose.yml", plan / "compose.override.yml"]
    files = [word for name in names for word in ("-f", str(name))]
    command = ["docker-compose", "--project-directory", str(ROOT), *files, "config"]
    environ = os.environ | {"KVMESH_MODEL_FOLDER": "/srv/8b", "KVMESH_PLAN": str(plan)}
    environ |= {"KVMESH_WORKER_MEMORY": "64g", "KVMESH_WORKER_CPUS": "8"}
    read = subprocess.run(command, check=True, env=environ, capture_output=True, text=True).stdout
    services = yaml.safe_load(read)["services"]
    option = recommended(plan)
    for role in ("prefill", "decode"):
        assert services[role]["scale"] == option[f"{role}_workers"]
        assert services[role]["healthcheck"]
        assert {target_of(volume) for volume in services[role]["volumes"]} == {"/models/8b"}
    planner = {target_of(volume) for volume in services["planner"]["volumes"]}
    assert planner == {"/etc/kvmesh/profile.json", "/etc/kvmesh/plan"}


def target_of(volume: str | dict[str, Any]) -> str:
    """Compose 1 writes a line, compose 2 a table."""
    return volume.split(":")[1] if isinstance(volume, str) else str(volume["target"])


def test_workers_understand_a_containers_command(plan: Path) -> None:
    services = yaml.safe_load((plan / "compose.override.yml").read_text())["services"]
    base = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for role in (Role.PREFILL, Role.DECODE):
        config, reference = (worker_of(read[role.value]["command"]) for read in (services, base))
        for name in ("role", "name", "advertise_host", "discovery", "host", "metrics_port"):
            assert getattr(config, name) == getattr(reference, name), name
        assert config.model_path == "/models/8b"
        assert "--tensor-parallel-size" in config.engine_args


def worker_of(command: list[str]) -> WorkerConfig:
    shell, flag, line = command
    assert (shell, flag) == ("sh", "-c")
    words = shlex.split(line.replace("$$(hostname -i)", "10.0.0.7").replace("$$(hostname)", "0123abcd"))
    assert words[:3] == ["exec", "kvmesh", "worker"]
    return read_worker(words[3:])


def read_worker(flags: list[str]) -> WorkerConfig:
    return load(WorkerConfig, flags, {}, prefix="KVMESH_WORKER_", prog="test")


# --- Kubernetes -------------------------------------------------------------------------------------------


def test_values_are_pools_of_the_option_and_a_planner_with_its_goal(plan: Path) -> None:
    values, option = yaml.safe_load((plan / "values.yaml").read_text()), recommended(plan)
    assert values["model"]["path"] == "/models/8b" and values["modelsClaim"]
    for role in ("prefill", "decode"):
        pool = values["pools"][role]
        assert (pool["role"], pool["replicas"]) == (role, option[f"{role}_workers"])
        assert pool["gpus"] == int(option[f"{role}_mapping"].removeprefix("tp"))
    settings = values["planner"]["settings"]
    assert (settings["ttft_slo_s"], settings["itl_slo_s"], settings["max_gpus"]) == (0.5, 0.02, 8)
    assert settings["prefill_profile"] == "/profiles/prefill.json"


@needs_helm
def test_the_chart_takes_the_values(plan: Path) -> None:
    objects = rendered(str(plan / "values.yaml"))
    flags = flags_of(container_of(objects, "demo-planner"))
    assert flags["--kubernetes-prefill"] == "deployment/demo-prefill"
    mounts = container_of(objects, "demo-planner")["volumeMounts"]
    assert {"name": "profiles", "mountPath": "/profiles", "readOnly": True} in mounts
    assert container_of(objects, "demo-decode")["resources"]["limits"]["nvidia.com/gpu"]


def read_planner(path: Path) -> ServiceConfig:
    return load(ServiceConfig, ["--config", str(path)], {}, prefix="KVMESH_PLANNER_", prog="test", section="planner")


# --- the planner's settings, the page, the picture --------------------------------------------------------


def test_the_planners_settings_are_the_goal(plan: Path) -> None:
    config = read_planner(plan / "planner.toml")
    assert (config.ttft_slo_s, config.itl_slo_s, config.max_gpus) == (0.5, 0.02, 8)
    assert (config.connector, config.flips) == ("virtual", False), "`kvmesh planner apply` carries its decisions out"
    option = recommended(plan)
    for role in ("prefill", "decode"):
        file = getattr(config, f"{role}_profile")
        assert file == f"/etc/kvmesh/plan/{role}.json", "the folder of the plan, in the container"
        assert read_profile(plan / f"{role}.json").mapping == option[f"{role}_mapping"]


def test_the_page_stands_alone_and_holds_all_options(plan: Path) -> None:
    page = (plan / "plan.html").read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "default-src 'none'" in page
    data = json.loads(page.split('<script id="data" type="application/json">')[1].split("</script>")[0])
    picks = json.loads((plan / "plan.json").read_text())
    assert [point["option"] for point in data["points"]] == picks["options"]
    assert data["recommended"] == picks["recommended"]
    assert data["command"].startswith("kvmesh profile plan --profiles ")


def test_a_name_cannot_end_the_pages_script(profiles: Path, tmp_path: Path) -> None:
    flags = ["--image", "</script><script>alert(1)</script>", "--out-dir", str(tmp_path), "--no-png"]
    assert main(["plan", "--profiles", str(profiles), *flags, *FLAGS]) == 0
    assert "alert(1)</script>" not in (tmp_path / "plan.html").read_text()
    values = yaml.safe_load((tmp_path / "values.yaml").read_text())
    assert values["images"]["worker"] == "</script><script>alert(1)</script>"


def test_the_picture_is_a_png(plan: Path) -> None:
    pytest.importorskip("matplotlib")
    assert (plan / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_only_the_picture_is_left_out(
    profiles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["plan", "--profiles", str(profiles), "--out-dir", str(tmp_path), *FLAGS]) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert line.startswith("pareto.png is left out: pictures need matplotlib")
    files = {path.name for path in tmp_path.iterdir()}
    assert "pareto.png" not in files
    assert {"compose.override.yml", "values.yaml", "planner.toml", "plan.html", "plan.json"} <= files


@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_tables_fit_80_columns(
    command: str, profiles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    flags = ["--profiles", str(profiles), "--no-png", *FLAGS]
    if command == "estimate":
        flags = ["--model-path", str(SHAPES / "llama-8b"), "--gpu", "b200", "--max-num-seqs", "4096"]
    assert main([command, "--out-dir", str(tmp_path), *flags]) == 0
    table = capsys.readouterr().err
    assert "..." not in table
    assert "…" not in table
    rows = [line for line in table.splitlines() if re.match(r"\s*(pick|mapping|\d+ |tp\d)", line)]
    assert len(rows) >= 3
    assert all(len(row.rstrip()) <= 80 for row in rows)


def test_the_plans_table_has_room_for_a_large_fleet() -> None:
    goal = Goal(ttft_slo_s=0.5, itl_slo_s=0.05, isl_tokens=3000, osl_tokens=300, gpus=1024)
    option = Option(
        prefill_mapping="dep16",
        decode_mapping="tep16",
        prefill_workers=12,
        decode_workers=48,
        gpus=960,
        batch=1024,
        rps=1234.56,
        ttft_s=1.234,
        itl_s=0.0456,
        tokens_s_gpu=12345.0,
        tokens_s_user=123.4,
        meets_ttft=True,
        meets_itl=True,
    )
    picks = Picks(goal=goal, options=[option] * 1000, front=[999], recommended=999, reasons=[])
    console = Console(width=80, file=io.StringIO())
    console.print(table_of(picks))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "12 dep16 + 48 tep16" in text
    assert "1234.56" in text
    assert "…" not in text


def test_a_person_picks_another_point_by_its_number(
    profiles: Path, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picks = json.loads((plan / "plan.json").read_text())
    number = picks["front"][-1]
    flags = [
        "--profiles",
        str(profiles),
        "--out-dir",
        str(tmp_path),
        "--no-png",
        "--json",
        "--pick",
        str(number),
        *FLAGS,
    ]
    assert main(["plan", *flags]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["option"] == picks["options"][number]
    services = yaml.safe_load((tmp_path / "compose.override.yml").read_text())["services"]
    assert services["decode"]["scale"] == told["option"]["decode_workers"]
    page = (tmp_path / "plan.html").read_text()
    assert "--pick" not in json.loads(re.split("</?script[^>]*>", page)[1])["command"]
    with pytest.raises(ConfigError, match="no option 9999"):
        main(["plan", "--profiles", str(profiles), "--out-dir", str(tmp_path), "--no-png", "--pick", "9999", *FLAGS])


def test_numbers_of_options_are_the_same_in_every_process(profiles: Path, tmp_path: Path) -> None:
    for seed in ("1", "2"):
        flags = ["--profiles", str(profiles), "--out-dir", str(tmp_path / seed), "--no-png", *FLAGS]
        environ = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-m", "kvmesh", "profile", "plan", *flags], check=True, env=environ)
    assert (tmp_path / "1" / "plan.json").read_bytes() == (tmp_path / "2" / "plan.json").read_bytes()


# --- when it cannot be ------------------------------------------------------------------------------------


def test_an_impossible_slo_gives_reasons_and_no_deployment(
    profiles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--profiles", str(profiles), "--out-dir", str(tmp_path), "--no-png", "--itl-slo-s", "0.0001"]
    assert main(["plan", *flags]) == 1
    assert "nothing keeps the SLO" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "plan.json"]


def test_unusable_profiles_say_what_to_do(profiles: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no profiles in"):
        main(["plan", "--profiles", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"no profile at .*; write one with"):
        main(["plan", "--profiles", str(tmp_path / "none.json")])
    both = ["--profiles", str(profiles), "--profiles", str(profiles / "tp1.json")]
    with pytest.raises(ConfigError, match="several prefill profiles of tp1"):
        main(["plan", *both])
    only = Profile(
        model="m",
        engine="e",
        device="d",
        total_kv_tokens=10,
        prefill=PrefillTable(isl_tokens=[1], ttft_s=[1.0]),
    )
    (tmp_path / "p.json").write_bytes(__import__("msgspec").json.encode(only))
    with pytest.raises(ConfigError, match="no profile has a decode table"):
        main(["plan", "--profiles", str(tmp_path / "p.json")])


# --- YAML -------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc-_./ 1:#", max_size=5), inner)
)


@given(values)
def test_yaml_is_read_as_it_was_meant(value: Any) -> None:
    assert yaml.safe_load(to_yaml(value)) == value
    assert list(yaml.safe_load_all(to_yaml(value, {"a": value}))) == [value, {"a": value}]


# --- images -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "flags", "image"),
    [
        ("vllm", [], "kvmesh/vllm:"),
        ("vllm", ["--image", "mine:1"], "mine:1"),
        ("sglang", ["--image", "mine:1"], "mine:1"),
        ("sglang", [], ""),
    ],
)
def test_the_image_has_the_engine_of_the_profiles(
    tmp_path: Path, engine: str, flags: list[str], image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    estimate = ["estimate", "--model-path", str(SHAPES / "llama-8b"), "--out-dir", str(tmp_path / "profiles")]
    assert main([*estimate, "--engine", engine, "--mapping", "tp1"]) == 0
    plan = ["plan", "--profiles", str(tmp_path / "profiles"), "--out-dir", str(tmp_path / "plan"), "--no-png"]
    asked = [*plan, "--model-path", "/models/8b", *flags, *FLAGS]
    if not image:
        with pytest.raises(ConfigError, match=r"no image of kvmesh has the engine sglang.*--image"):
            main(asked)
        return
    assert main(asked) == 0
    values = yaml.safe_load((tmp_path / "plan" / "values.yaml").read_text())
    services = yaml.safe_load((tmp_path / "plan" / "compose.override.yml").read_text())["services"]
    assert {values["images"]["worker"], services["prefill"]["image"]} == {values["images"]["worker"]}
    assert values["images"]["worker"].startswith(image)
