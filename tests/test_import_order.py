"""Imports point down and never in a circle: docs/architecture.md, "Tree". Read from the source, nothing is run."""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    "benchmarks": PLANES | SERVICES | {"cluster", "simulator", "profiler"},
    "kvmesh": PLANES | SERVICES | {"cluster", "simulator", "profiler", "benchmarks"},  # the command, alone on top
}
PROTOCOL_NEEDS = frozenset({"msgspec", "xxhash"}) | sys.stdlib_module_names


@dataclass(frozen=True, slots=True)
class Import:
    importer: str
    target: str  # the module that is imported, or that a name is imported from
    line: int
    at_load: bool  # not inside a function, not for types alone

    @property
    def package(self) -> str:
        return self.target.partition(".")[0]


def read_modules() -> dict[str, str]:
    """Source text of every module of ours by its dotted name; a package by its own name."""
    modules: dict[str, str] = {}
    for package in MAY_USE:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = file.read_text(encoding="utf-8")
    return modules


def imports_of(modules: Mapping[str, str], packages: frozenset[str] = frozenset()) -> list[Import]:
    """`packages`: those of `modules` that are packages, for relative imports."""
    return [
        Import(name, target, node.lineno, at_load)
        for name, source in modules.items()
        for node, at_load in statements(ast.parse(source), at_load=True)
        for target in targets(node, name, name in packages, modules)
    ]


def statements(node: ast.AST, at_load: bool) -> Iterator[tuple[ast.stmt | ast.expr, bool]]:
    """All imports under `node`, and whether loading the module carries them out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom | ast.Call):
            yield child, at_load
        lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or for_types_alone(child)
        yield from statements(child, at_load and not lazy)


def for_types_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


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
        home = found.importer.partition(".")[0]
        if found.package in ("tests", *MAY_USE) and found.package not in (home, *MAY_USE[home]):
            wrong.append(f"{found.importer}:{found.line}: {home} may not use {found.target}")
        if home == "protocol" and found.package not in ("protocol", *MAY_USE, *PROTOCOL_NEEDS):
            wrong.append(f"{found.importer}:{found.line}: protocol may not need {found.target}")
    return wrong


def cycle(imports: list[Import]) -> list[str]:
    """The modules of one circle of imports that loading would run into, [] if there is none."""
    edges: dict[str, set[str]] = {}
    for found in imports:
        if found.at_load:
            edges.setdefault(found.importer, set()).add(found.target)
    finished: set[str] = set()
    path: list[str] = []

    def walk(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        path.append(module)
        for target in sorted(edges.get(module, ())):
            if circle := walk(target):
                return circle
        path.pop()
        finished.add(module)
        return []

    return next((circle for module in sorted(edges) if (circle := walk(module))), [])


@pytest.fixture(scope="module")
def ours() -> list[Import]:
    packages = frozenset(".".join(init.parent.relative_to(ROOT).parts) for init in ROOT.glob("*/**/__init__.py"))
    return imports_of(read_modules(), packages)


def test_the_imports_are_found(ours: list[Import]) -> None:
    assert any(found.importer == "mesh.config" and found.target == "protocol.errors" for found in ours)
    assert {found.importer.partition(".")[0] for found in ours} >= {"protocol", "mesh", "kvcache", "router", "frontend"}


def test_imports_point_down(ours: list[Import]) -> None:
    assert order_violations(ours) == []


def test_no_modules_import_each_other_in_a_circle(ours: list[Import]) -> None:
    assert cycle(ours) == []


@pytest.mark.parametrize(
    ("importer", "source", "target"),
    [
        ("protocol.ids", "import mesh.config", "mesh.config"),
        ("protocol.ids", "import numpy", "numpy"),
        ("mesh.plane", "from kvcache import pool", "kvcache"),
        ("kvcache.pool", "from kvevents.formats import encode", "kvevents.formats"),
        ("kvevents.formats", "import kvcache.pool", "kvcache.pool"),
        ("router.core", "from frontend.http import build_app", "frontend.http"),
        ("workers.service", "from router.core import RouterState", "router.core"),
        ("planner.service", "import workers", "workers"),
        ("frontend.service", "from kvmesh import up", "kvmesh"),
        ("mesh.config", "from tests.support import clock", "tests.support"),
        ("mesh.config", "def f():\n    from router.core import RouterState", "router.core"),
        ("mesh.config", "async def f():\n    if True:\n        import workers.config", "workers.config"),
        ("mesh.config", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import router", "router"),
        ("mesh.config", "import importlib\nimportlib.import_module('router.core')", "router.core"),
        ("mesh.config", "from ..router import core", "router"),
    ],
)
def test_an_import_that_points_up_is_caught(importer: str, source: str, target: str) -> None:
    [violation] = order_violations(imports_of({importer: source}))
    assert violation.endswith(target)


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("frontend.service", "from router.service import LocalRouter"),
        ("kvmesh.up", "import workers.config, frontend.config"),
        ("benchmarks.load", "from cluster.local import running_cluster"),
        ("protocol.hashing", "import xxhash, msgspec, struct"),
        ("workers.engines.torch.executor", "import torch"),
        ("mesh.config", "from . import lifecycle"),
    ],
)
def test_an_import_that_points_down_is_fine(importer: str, source: str) -> None:
    assert order_violations(imports_of({importer: source})) == []


def test_a_circle_is_caught() -> None:
    modules = {
        "mesh.a": "from mesh import b",
        "mesh.b": "from mesh.c import thing",
        "mesh.c": "class C:\n    import mesh.a",
    }
    assert cycle(imports_of(modules)) == ["mesh.a", "mesh.b", "mesh.c", "mesh.a"]


def test_a_backend_that_is_imported_when_it_is_chosen_makes_no_circle() -> None:
    modules = {
        "mesh.store": "def open_store():\n    from mesh.file import FileStore",
        "mesh.file": "import mesh.store",
    }
    assert cycle(imports_of(modules)) == []


def test_relative_imports_are_followed() -> None:
    modules = {"mesh.plane": "from .link import Link", "mesh.plane.link": "from . import link2", "mesh.plane.link2": ""}
    found = imports_of(modules, frozenset({"mesh.plane"}))
    assert [one.target for one in found] == ["mesh.plane.link", "mesh.plane.link2"]
