"""All code is one package: a module has one name, and no file of the working directory takes the place of one."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from importlib import import_module
from pathlib import Path

import httpx
import pytest

import kvmesh.commands.up
import kvmesh.frontend.service
import kvmesh.workers.service  # noqa: F401 - for test_no_module_is_loaded_twice
from kvmesh.profiler.deployment.chart import CHART
from tests.support.mesh import START_S, until
from tests.support.patience import PATIENCE_S
from tests.support.services import quiet_port
from tests.test_import_order import MAY_USE, ROOT

FOLDERS = sorted(MAY_USE.keys() - {"kvmesh"})
TRAPS = ("workers/__init__.py", "router/__init__.py", "frontend/__init__.py", "kvmesh/__init__.py", "mesh.py")
STANDARD_TRAPS = ("random.py", "json.py", "asyncio.py")
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # knows nothing of this tree


def test_the_package_leads_to_every_folder_of_code() -> None:
    links = {path.name: os.readlink(path) for path in (ROOT / "kvmesh").iterdir() if path.is_symlink()}
    assert links == {name: f"../{name}" for name in FOLDERS}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_code_has_no_second_name(name: str) -> None:
    with pytest.raises(ImportError):
        import_module(name)


def test_no_module_is_loaded_twice() -> None:
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    places = {name: Path(os.path.realpath(file)) for name, file in files.items() if file}
    ours = {name: file for name, file in places.items() if file.is_relative_to(ROOT) and is_code(file)}
    assert {"kvmesh.commands.up", "kvmesh.frontend.service", "kvmesh.workers.service"} <= ours.keys()
    assert [name for name in ours if name.partition(".")[0] != "kvmesh"] == []
    assert len(ours) == len(set(ours.values()))


def is_code(file: Path) -> bool:
    return file.relative_to(ROOT).parts[0] in MAY_USE


@pytest.mark.long
def test_an_installed_kvmesh_finds_the_whole_chart(tmp_path: Path) -> None:
    python = installed(tmp_path)
    source = "from kvmesh.profiler.deployment.chart import CHART; print(CHART)"
    found = subprocess.run(
        [python, "-P", "-c", source], cwd=tmp_path, env=OUTSIDE, capture_output=True, text=True, check=True
    )
    chart, original = Path(found.stdout.strip()), ROOT / "deploy" / "helm" / "kvmesh"
    assert chart.is_relative_to(tmp_path / "venv")
    assert contents(chart) == contents(original)
    assert "name: kvmesh" in (chart / "Chart.yaml").read_text()


def test_a_checkout_finds_its_chart() -> None:
    assert CHART == ROOT / "deploy" / "helm" / "kvmesh"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.long
def test_an_installed_mesh_serves_from_a_folder_full_of_traps(tmp_path: Path) -> None:
    python = installed(tmp_path)
    traps = tmp_path / "traps"
    for trap in (*TRAPS, *STANDARD_TRAPS):
        (traps / trap).parent.mkdir(parents=True, exist_ok=True)
        (traps / trap).write_text("raise SystemExit('a trap was run')\n")
    port = quiet_port()
    command = [python.with_name("kvmesh"), "up", "--engine", "mock", "--port", str(port), "--run-dir", tmp_path / "run"]
    with (tmp_path / "said").open("wb") as log:
        process = subprocess.Popen(command, cwd=traps, env=OUTSIDE, stdout=log, stderr=log)
    try:
        said = tmp_path / "said"
        until(lambda: "The mesh is up" in said.read_text() or process.poll() is not None, START_S, "the mesh")
        assert process.poll() is None, said.read_text()
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0, said.read_text()
    finally:
        process.kill()
        process.wait()


def installed(folder: Path) -> Path:
    """Install the wheel, without native code, into an environment that borrows the dependencies of this one."""
    tree = folder / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("kvmesh", *FOLDERS):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    shutil.copytree(ROOT / "deploy" / "helm", tree / "deploy" / "helm", symlinks=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, tree)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as inside:
        [listed] = [name for name in inside.namelist() if name.endswith("/top_level.txt")]
        assert inside.read(listed) == b"kvmesh\n"
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel)
    [packages] = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def run(*command: object) -> None:
    environ = OUTSIDE | {"CC": "false", "CXX": "false"}
    done = subprocess.run([str(word) for word in command], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
