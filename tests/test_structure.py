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
    """A definition and where it stands."""

    path: str
    node: Documented

    def __str__(self) -> str:
        return f"{self.path}:{getattr(self.node, 'lineno', 1)} {getattr(self.node, 'name', '')}".rstrip()


@cache
def definitions(folder: str) -> tuple[Place, ...]:
    """Return every module, class and function below the folder."""
    return tuple(
        Place(str(file.relative_to(ROOT)), node)
        for file in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, Documented)
    )


def ours() -> Iterator[Place]:
    """Yield the definitions of all packages, without the tests."""
    for package in MAY_USE:
        yield from definitions(package)


def lines(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_only_the_four_named_classes_have_more_than_30_methods() -> None:
    large = [
        f"{place}: {count} methods"
        for place in ours()
        if isinstance(place.node, ast.ClassDef) and place.node.name not in LARGE_CLASSES
        if (count := sum(isinstance(part, Function) for part in place.node.body)) > MOST_METHODS
    ]
    assert large == [], "give a part of its state a class of its own"


def test_no_function_is_longer_than_48_lines() -> None:
    long = [
        f"{place}: {lines(place.node)} lines"
        for place in ours()
        if isinstance(place.node, Function) and lines(place.node) > MOST_LINES
    ]
    assert long == [], "give a step of it a function with a name"


def test_most_functions_are_short() -> None:
    lengths = sorted(lines(place.node) for place in ours() if isinstance(place.node, Function))
    assert statistics.median(lengths) <= MEDIAN_LINES
    assert lengths[int(0.9 * len(lengths))] <= P90_LINES


def test_a_public_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for place in ours():
        if isinstance(place.node, ast.Module) and not VENDOR_SHAPES.match(place.path):
            for part in place.node.body:
                if isinstance(part, ast.ClassDef) and not part.name.startswith("_"):
                    found[part.name].append(f"{place.path}:{part.lineno}")
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert twice == {}, "the lower package keeps the name, the other class takes a more precise one"


@pytest.mark.parametrize("folder", [*MAY_USE, "tests"])
def test_docstrings_are_sentences(folder: str) -> None:
    fragments = [
        f"{place}: {text.splitlines()[0]}"
        for place in definitions(folder)
        if (text := ast.get_docstring(place.node)) and FRAGMENT.match(text)
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
