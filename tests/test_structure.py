"""The shape of the code: small classes and functions, one meaning for a name, docstrings that are sentences."""

import ast
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.test_import_order import MAY_USE

ROOT = Path(__file__).parent.parent
MOST_METHODS = 30
LARGE_CLASSES = {"Scheduler", "Cursor", "Connection", "BlockPool"}  # each keeps one invariant
MOST_LINES, MEDIAN_LINES, P90_LINES = 48, 6, 17
VENDOR_SHAPES = re.compile(r"frontend/(openai|anthropic|responses)/")  # there the vendor's API gives the names
FRAGMENT = re.compile(r"(Of|Who|Whom|Whose|What|Which|Where|Whether|Those|That|How|Why|Than)\b|[a-z]+ [a-z]")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module


@dataclass(frozen=True, slots=True)
class Place:
    """A definition and where it stands. The syntax tree itself is not kept: all trees are millions of objects."""

    path: str
    kind: type[ast.AST]
    name: str = ""
    line: int = 1
    lines: int = 0
    docstring: str = ""
    methods: int = 0  # of a class
    is_top: bool = False  # directly in a module

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.name}".rstrip()


def place_of(path: str, node: Documented, is_top: bool) -> Place:
    docstring = ast.get_docstring(node) or ""
    if isinstance(node, ast.Module):
        return Place(path, ast.Module, docstring=docstring)
    assert node.end_lineno is not None
    methods = sum(isinstance(part, Function) for part in node.body)
    lines = node.end_lineno - node.lineno + 1
    return Place(path, type(node), node.name, node.lineno, lines, docstring, methods, is_top)


def documented(node: ast.AST) -> Iterator[Documented]:
    """Yield a node and all below it that may have a docstring. They are statements, so expressions are left out."""
    if isinstance(node, Documented):
        yield node
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, part, None) or ():
            yield from documented(child)


@cache
def definitions(folder: str) -> tuple[Place, ...]:
    """Return every module, class and function below the folder."""
    found: list[Place] = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        module = ast.parse(file.read_text(encoding="utf-8"))
        found += [place_of(str(file.relative_to(ROOT)), node, node in module.body) for node in documented(module)]
    return tuple(found)


def ours() -> Iterator[Place]:
    """Yield the definitions of all packages, without the tests."""
    for package in MAY_USE:
        yield from definitions(package)


def functions() -> list[Place]:
    return [place for place in ours() if issubclass(place.kind, Function)]


def test_only_the_four_named_classes_have_more_than_30_methods() -> None:
    large = [
        f"{place}: {place.methods} methods"
        for place in ours()
        if place.kind is ast.ClassDef and place.name not in LARGE_CLASSES and place.methods > MOST_METHODS
    ]
    assert large == [], "give a part of its state a class of its own"


def test_no_function_is_longer_than_48_lines() -> None:
    long = [f"{place}: {place.lines} lines" for place in functions() if place.lines > MOST_LINES]
    assert long == [], "give a step of it a function with a name"


def test_most_functions_are_short() -> None:
    lengths = sorted(place.lines for place in functions())
    assert statistics.median(lengths) <= MEDIAN_LINES
    assert lengths[int(0.9 * len(lengths))] <= P90_LINES


def test_a_public_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for place in ours():
        is_public = place.kind is ast.ClassDef and place.is_top and not place.name.startswith("_")
        if is_public and not VENDOR_SHAPES.match(place.path):
            found[place.name].append(f"{place.path}:{place.line}")
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert twice == {}, "the lower package keeps the name, the other class takes a more precise one"


@pytest.mark.parametrize("folder", [*MAY_USE, "tests"])
def test_docstrings_are_sentences(folder: str) -> None:
    fragments = [
        f"{place}: {place.docstring.splitlines()[0]}"
        for place in definitions(folder)
        if FRAGMENT.match(place.docstring)
    ]
    assert fragments == [], "begin with what the definition does: 'Return ...', 'Raise ...', 'Track ...'"


@pytest.mark.parametrize(
    ("docstring", "is_fragment"),
    [
        ("Of the slots those that can take it.", True),
        ("Who may answer.", True),
        ("that lives", True),
        ("Return the slots that can take the request.", False),
        ("Whatever happens, raise nothing.", False),
        ("`kvmesh up`: the whole mesh.", False),
    ],
)
def test_a_fragment_is_known_by_its_first_word(docstring: str, is_fragment: bool) -> None:
    assert bool(FRAGMENT.match(docstring)) == is_fragment
