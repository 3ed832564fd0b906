"""Extensions can be removed: the core imports none of their modules, and a mesh without any one of them serves."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.mesh.extensions import EXTENSIONS, Extension
from tests.support.mesh import running_mesh
from tests.test_import_order import ROOT, Import, imports_of, name_of, read_modules


@pytest.fixture(scope="module")
def ours() -> list[Import]:
    return imports_of(read_modules(), frozenset(name_of(init) for init in ROOT.glob("*/**/__init__.py")))


def owner_of(module: str) -> Extension | None:
    """Return the extension that a module belongs to, None for the core. The longest folder decides."""
    longest, owner = "", None
    for extension in EXTENSIONS:
        for folder in extension.all_folders:
            dotted = "kvmesh." + folder.removeprefix("kvmesh/").replace("/", ".")
            if f"{module}.".startswith(f"{dotted}.") and len(dotted) > len(longest):
                longest, owner = dotted, extension
    return owner


def arrows_to_extensions(imports: list[Import]) -> list[str]:
    """Return the imports of extensions by the core, or by extensions that do not declare the need."""
    wrong: list[str] = []
    for found in imports:
        owner, target = owner_of(found.importer), owner_of(found.target)
        if target is None or owner is target or found.importer.startswith("kvmesh.lab."):
            continue
        if owner is None or target.name not in owner.needs:
            wrong.append(f"{found.importer}:{found.line} imports {found.target} of the extension {target.name}")
    return wrong


def test_the_core_imports_no_extension(ours: list[Import]) -> None:
    assert arrows_to_extensions(ours) == []


def test_every_extension_has_its_folders() -> None:
    missing = [
        folder
        for extension in EXTENSIONS
        for folder in extension.all_folders
        if not (ROOT / folder / "__init__.py").exists()
    ]
    assert missing == []


def test_every_seam_of_an_extension_has_its_module() -> None:
    paths = [Path(ROOT, folder, "extension.py") for extension in EXTENSIONS for folder in extension.seams.values()]
    assert [path for path in paths if not path.exists()] == []


def test_extensions_need_only_extensions_that_exist() -> None:
    names = [extension.name for extension in EXTENSIONS]
    assert len(set(names)) == len(names)
    assert {need for extension in EXTENSIONS for need in extension.needs} <= set(names)


# --- a copy of the tree without an extension ----------------------------------------------------------

IMPORT_ALL = """
import importlib, pkgutil, sys
import kvmesh

assert kvmesh.__path__[0].startswith(sys.argv[1]), kvmesh.__path__
for name in ("torch", "transformers", "vllm", "sglang"):  # these take seconds
    sys.modules[name] = None
for module in pkgutil.walk_packages(kvmesh.__path__, "kvmesh.", onerror=lambda name: None):
    if module.name.endswith(("__main__", "_native")) or module.name.startswith("kvmesh.lab"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # a package that is not installed here
        if error.name.startswith("kvmesh"):
            raise
"""


def removed_with(name: str) -> list[Extension]:
    """Return the extension and those that need it."""
    gone = {name}
    while more := {one.name for one in EXTENSIONS if gone & set(one.needs)} - gone:
        gone |= more
    return [one for one in EXTENSIONS if one.name in gone]


def copy_tree(target: Path) -> None:
    """Copy what git tracks, without the tests, and the native modules."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    native = [str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/_native*.so")]
    for name in [*filter(None, listed.split("\0")), *native]:
        if name.startswith(("tests/", "docs/", "ui/")) or not os.path.lexists(ROOT / name):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def remove(extension: Extension, tree: Path) -> None:
    """Delete the folders of an extension and its entry in the table."""
    for folder in extension.all_folders:
        shutil.rmtree(tree / folder, ignore_errors=True)  # one may lie in another's
    table = tree / "mesh" / "extensions.py"
    text = table.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name(id="Extension"), args=[ast.Constant(value=extension.name), *_]):
                del lines[node.lineno - 1 : node.end_lineno]
    table.write_text("".join(lines), encoding="utf-8")


def tree_without(gone: list[Extension], folder: Path) -> Path:
    """Return a copy of the tree without some extensions. Raise AssertionError if a module there cannot be imported."""
    tree = folder / "tree"
    copy_tree(tree)
    for extension in gone:
        remove(extension, tree)
    imported = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_ALL, str(tree)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert imported.returncode == 0, imported.stderr
    return tree


def check_serves(tree: Path, run_dir: Path) -> None:
    flags = ("--engine", "mock", "--decode", "1")
    with running_mesh(run_dir, *flags, env={"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}) as mesh:
        assert mesh.chat([{"role": "user", "content": "Hello"}], max_tokens=4)["choices"]


@pytest.mark.long
def test_the_core_serves_without_any_extension(tmp_path: Path) -> None:
    check_serves(tree_without(list(EXTENSIONS), tmp_path), tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize("name", [one.name for one in EXTENSIONS])
def test_all_other_modules_are_imported_without_an_extension(name: str, tmp_path: Path) -> None:
    tree_without(removed_with(name), tmp_path)


@pytest.mark.weekly
@pytest.mark.parametrize("name", [one.name for one in EXTENSIONS])
def test_a_mesh_serves_without_an_extension(name: str, tmp_path: Path) -> None:
    check_serves(tree_without(removed_with(name), tmp_path), tmp_path / "run")
