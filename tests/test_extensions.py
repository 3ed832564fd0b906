"""Extensions can be removed: the core imports none of their modules. The tests read the source and run nothing."""

from pathlib import Path

import pytest

from kvmesh.mesh.extensions import EXTENSIONS, Extension
from tests.test_import_order import ROOT, Import, imports_of, name_of, read_modules


@pytest.fixture(scope="module")
def ours() -> list[Import]:
    return imports_of(read_modules(), frozenset(name_of(init) for init in ROOT.glob("*/**/__init__.py")))


def owner_of(module: str) -> Extension | None:
    """Return the extension that a module belongs to, None for the core."""
    for extension in EXTENSIONS:
        for folder in extension.all_folders:
            dotted = "kvmesh." + folder.removeprefix("kvmesh/").replace("/", ".")
            if module == dotted or module.startswith(dotted + "."):
                return extension
    return None


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
