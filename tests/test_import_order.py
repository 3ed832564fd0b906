"""Imports point down and never in a circle: docs/architecture.md, "Tree". The tests read the source and run nothing.

An import counts wherever it stands: at the top of a file, inside a function, for types alone. A module that calls
`import_module` with a name from a table imports every module of ours whose dotted name it has as a string.
"""

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PLANES = frozenset({"protocol", "mesh", "kvevents", "kvcache"})
SERVICES = frozenset({"router", "workers", "planner", "frontend"})
MAY_USE: Mapping[str, frozenset[str]] = {
    "protocol": frozenset(),
    "mesh": frozenset({"protocol"}),
    "kvevents": frozenset({"protocol", "mesh"}),
    "kvcache": frozenset({"protocol", "mesh"}),
    "router": PLANES,
    "workers": PLANES,
    "planner": PLANES,
    "frontend": PLANES | {"router"},  # the one edge between services: it hosts a router in-process
    "cluster": PLANES | SERVICES,
    "simulator": PLANES | SERVICES,
    "profiler": PLANES | SERVICES | {"cluster", "simulator"},
    "kvmesh": PLANES | SERVICES | {"cluster", "simulator", "profiler"},  # the command
    "lab": PLANES | SERVICES | {"cluster", "simulator", "profiler", "kvmesh"},  # alone on top
}
# Edges that point sideways or up on purpose: what starts a service may open one other by name, when it is told to.
OPENED: frozenset[tuple[str, str]] = frozenset(
    {
        ("kvmesh.commands.laboratory", "kvmesh.lab.commands"),
    }
)
PROTOCOL_NEEDS = frozenset({"msgspec", "xxhash"}) | sys.stdlib_module_names


@dataclass(frozen=True, slots=True)
class Import:
    importer: str
    target: str  # the module that is imported, or that a name is imported from
    line: int

    @property
    def package(self) -> str:
        return package_of(self.target)


def package_of(module: str) -> str:
    """Return the folder of a module of ours; "kvmesh" for the command's own. Of others, the package."""
    first, second, *_ = [*module.split("."), ""]
    return second if first == "kvmesh" and second in MAY_USE else first


def read_modules() -> dict[str, str]:
    """Return the source text of every module of ours by its dotted name; a package has the package's name."""
    modules: dict[str, str] = {}
    for package in MAY_USE:
        for file in sorted((ROOT / package).rglob("*.py")):
            modules[name_of(file)] = file.read_text(encoding="utf-8")
    return modules


def name_of(file: Path) -> str:
    """Return the dotted name of a module of ours."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "kvmesh" else ("kvmesh", *parts))


def imports_of(modules: Mapping[str, str], packages: frozenset[str] = frozenset()) -> list[Import]:
    """Return all imports of `modules`. `packages` names the modules that are packages, for relative imports."""
    found: list[Import] = []
    for name, source in modules.items():
        nodes = list(ast.walk(ast.parse(source)))
        imports_by_name = any(is_import_by_name(node) for node in nodes)
        for node in nodes:
            names = targets(node, name, name in packages, modules)
            if imports_by_name and isinstance(node, ast.Constant) and node.value in modules:
                names = [str(node.value)]
            found += [Import(name, target, getattr(node, "lineno", 0)) for target in names if target != name]
    return found


def is_import_by_name(node: ast.AST) -> bool:
    """Tell whether `node` calls `import_module` with anything but a plain string."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("import_module"):
        return False
    return not (node.args and isinstance(node.args[0], ast.Constant))


def targets(node: ast.AST, importer: str, is_package: bool, modules: Mapping[str, str]) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom():
            above = importer.split(".")
            origin = above[: len(above) - node.level + is_package] if node.level else []
            base = ".".join([*origin, *([node.module] if node.module else [])])
            submodules = [f"{base}.{alias.name}" for alias in node.names]
            return [name if name in modules else base for name in submodules]
        case ast.Call(args=[ast.Constant(value=str(name)), *_]):
            return [name] if ast.unparse(node.func).endswith("import_module") else []
    return []


def order_violations(imports: list[Import]) -> list[str]:
    """Imports that point up or sideways, wherever in a module they stand."""
    wrong: list[str] = []
    for found in imports:
        home = package_of(found.importer)
        is_opened = (found.importer, found.target) in OPENED
        if not is_opened and found.package in ("tests", *MAY_USE) and found.package not in (home, *MAY_USE[home]):
            wrong.append(f"{found.importer}:{found.line}: {home} may not use {found.target}")
        if found.target.partition(".")[0] in MAY_USE.keys() - {"kvmesh"}:
            wrong.append(f"{found.importer}:{found.line}: there is no {found.target}, but kvmesh.{found.target}")
        if home == "protocol" and found.package not in ("protocol", *MAY_USE, *PROTOCOL_NEEDS):
            wrong.append(f"{found.importer}:{found.line}: protocol may not need {found.target}")
    return wrong


def cycle(imports: list[Import]) -> list[str]:
    """Return the modules of one circle of imports, [] if there is none."""
    edges: dict[str, set[str]] = {}
    for found in imports:
        edges.setdefault(found.importer, set()).add(found.target)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle[::-1]
    return []


@pytest.fixture(scope="module")
def ours() -> list[Import]:
    packages = frozenset(name_of(init) for init in ROOT.glob("*/**/__init__.py"))
    return imports_of(read_modules(), packages)


def test_the_imports_are_found(ours: list[Import]) -> None:
    assert any(found.importer == "kvmesh.mesh.config" and found.target == "kvmesh.protocol.errors" for found in ours)
    assert {package_of(found.importer) for found in ours} >= {"protocol", "mesh", "kvcache", "router", "frontend"}


def test_imports_point_down(ours: list[Import]) -> None:
    assert order_violations(ours) == []


def test_all_edges_that_point_up_are_there(ours: list[Import]) -> None:
    assert {(found.importer, found.target) for found in ours} >= OPENED


def test_no_files_import_each_other_in_a_circle(ours: list[Import]) -> None:
    assert cycle(ours) == []


def test_the_command_table_counts_as_imports(ours: list[Import]) -> None:
    of_the_command = {found.target for found in ours if found.importer == "kvmesh.__main__"}
    assert {
        "kvmesh.commands.up",
        "kvmesh.frontend.__main__",
        "kvmesh.workers.__main__",
    } <= of_the_command


@pytest.mark.parametrize(
    ("importer", "source", "target"),
    [
        ("kvmesh.protocol.ids", "import kvmesh.mesh.config", "kvmesh.mesh.config"),
        ("kvmesh.protocol.ids", "import numpy", "numpy"),
        ("kvmesh.mesh.plane", "from kvmesh.kvcache import pool", "kvmesh.kvcache"),
        ("kvmesh.kvcache.pool", "from kvmesh.kvevents.formats import encode", "kvmesh.kvevents.formats"),
        ("kvmesh.kvevents.formats", "import kvmesh.kvcache.pool", "kvmesh.kvcache.pool"),
        ("kvmesh.router.core", "from kvmesh.frontend.http import build_app", "kvmesh.frontend.http"),
        ("kvmesh.router.service", "from kvmesh.frontend.picker.service import serve", "kvmesh.frontend.picker.service"),
        ("kvmesh.workers.service", "from kvmesh.router.core import RouterState", "kvmesh.router.core"),
        ("kvmesh.planner.service", "import kvmesh.workers", "kvmesh.workers"),
        ("kvmesh.frontend.service", "from kvmesh import up", "kvmesh"),
        ("kvmesh.mesh.config", "from tests.support import clock", "tests.support"),
        ("kvmesh.mesh.config", "def f():\n    from kvmesh.router.core import RouterState", "kvmesh.router.core"),
        (
            "kvmesh.mesh.config",
            "async def f():\n    if True:\n        import kvmesh.workers.config",
            "kvmesh.workers.config",
        ),
        (
            "kvmesh.mesh.config",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kvmesh.router",
            "kvmesh.router",
        ),
        ("kvmesh.mesh.config", "import importlib\nimportlib.import_module('kvmesh.router.core')", "kvmesh.router.core"),
        (
            "kvmesh.mesh.config",
            "import importlib\nTABLE = {'a': 'kvmesh.router'}\nimportlib.import_module(TABLE['a'])",
            "kvmesh.router",
        ),
        ("kvmesh.mesh.config", "from ..router import core", "kvmesh.router"),
    ],
)
def test_an_import_that_points_up_is_caught(importer: str, source: str, target: str) -> None:
    [violation] = order_violations(imports_of({importer: source, "kvmesh.router": ""}))
    assert violation.endswith(target)


def test_a_folder_is_imported_by_its_one_name() -> None:
    [violation] = order_violations(imports_of({"kvmesh.workers.service": "import protocol.ids"}))
    assert violation.endswith("there is no protocol.ids, but kvmesh.protocol.ids")


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("kvmesh.frontend.service", "from kvmesh.router.service import LocalRouter"),
        ("kvmesh.commands.up", "import kvmesh.workers.config, kvmesh.frontend.config"),
        ("kvmesh.lab.bench.load", "from kvmesh.cluster.running import running_cluster"),
        ("kvmesh.protocol.hashing", "import xxhash, msgspec, struct"),
        ("kvmesh.workers.engines.torch.executor", "import torch"),
        ("kvmesh.mesh.config", "from . import lifecycle"),
    ],
)
def test_an_import_that_points_down_is_fine(importer: str, source: str) -> None:
    assert order_violations(imports_of({importer: source})) == []


@pytest.mark.parametrize(
    "source",
    [
        "class C:\n    import kvmesh.mesh.a",
        "def f():\n    from kvmesh.mesh.a import A",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvmesh.mesh.a import A",
        "from importlib import import_module\nNAMES = ['kvmesh.mesh.a']\nimport_module(NAMES[0])",
    ],
)
def test_a_circle_is_caught_wherever_the_import_stands(source: str) -> None:
    modules = {
        "kvmesh.mesh.a": "from kvmesh.mesh import b",
        "kvmesh.mesh.b": "from kvmesh.mesh.c import thing",
        "kvmesh.mesh.c": source,
    }
    found = cycle(imports_of(modules))
    start = found.index("kvmesh.mesh.a")
    assert [*found[start:-1], *found[:start]] == ["kvmesh.mesh.a", "kvmesh.mesh.b", "kvmesh.mesh.c"]


def test_relative_imports_are_followed() -> None:
    modules = {
        "kvmesh.mesh.plane": "from .link import Link",
        "kvmesh.mesh.plane.link": "from . import link2",
        "kvmesh.mesh.plane.link2": "",
    }
    found = imports_of(modules, frozenset({"kvmesh.mesh.plane"}))
    assert [one.target for one in found] == ["kvmesh.mesh.plane.link", "kvmesh.mesh.plane.link2"]
