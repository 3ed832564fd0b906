"""The page that is committed is the one that its sources give."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UI, BUILT = ROOT / "ui", ROOT / "frontend" / "live" / "built"
MOST_BYTES = 150 * 1024


def source_hash() -> str:
    """Return the hash that ui/build.mjs writes into what it builds."""
    digest = hashlib.sha256()
    own = ["build.mjs", "package-lock.json", "tsconfig.json"]
    for name in sorted([*(f"src/{path.name}" for path in (UI / "src").iterdir()), *own]):
        digest.update(f"{name}\n".encode() + (UI / name).read_bytes() + b"\n")
    return digest.hexdigest()


def test_the_built_page_is_of_these_sources() -> None:
    assert source_hash() in (BUILT / "app.js").read_text("utf-8").splitlines()[0], "run `make ui`"


def test_the_built_page_is_small() -> None:
    assert sum(path.stat().st_size for path in BUILT.iterdir()) <= MOST_BYTES


def test_building_again_gives_the_same_bytes(tmp_path: Path) -> None:
    is_installed = shutil.which("node") is not None and (UI / "node_modules" / "esbuild").exists()
    if not is_installed and not os.environ.get("KVMESH_TEST_UI"):
        pytest.skip("node and ui/node_modules are not there: make ui")
    subprocess.run(["node", str(UI / "build.mjs"), str(tmp_path)], check=True, capture_output=True, timeout=120)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in BUILT.iterdir()
    }, "run `make ui`"
