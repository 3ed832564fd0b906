"""Recipes of CONTRIBUTING.md are complete: their code blocks are applied to a copy of the tree, whose tests then pass.

A recipe begins at `<!-- recipe: name -->` and ends at the next heading. The first line of a block is a comment with the
file and the place: "before NAME", "in NAME" (a table in Python, or the table under a heading), or none for a new file.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TREE = [
    "kvmesh",
    "protocol",
    "mesh",
    "kvevents",
    "kvcache",
    "router",
    "frontend",
    "docs",
    "tests",
    "pyproject.toml",
    "CONTRIBUTING.md",
]
MARKER = re.compile(r"<!-- recipe: (\S+) -->")
PLACE = r"(?:# |<!-- )(?P<file>[^\s,]+)(?:, (?P<place>.+?))?(?: -->)?"
BLOCK = re.compile(rf"^```\w+\n{PLACE}\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Recipe:
    tests: list[str]  # that must pass afterwards
    proof: str  # a part of the names of tests that run for the new thing


RECIPES = {
    "routing-policy": Recipe(["tests/router/test_policies.py", "tests/router/test_config.py"], "fewest-requests"),
}


def sections() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each recipe."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for marker in MARKER.finditer(page):
        yield marker[1], re.split(r"^##+ ", page[marker.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def apply(block: re.Match[str], tree: Path) -> None:
    file, place, text = tree / block["file"], block["place"], block["text"]
    if place is None:
        assert not file.exists(), f"{file.name} exists: say where in it the block belongs"
        file.write_text(text, encoding="utf-8")
        return
    side, _, name = place.partition(" ")
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    first, last = table_of(lines, name) if file.suffix == ".md" else statement_of(lines, name)
    at = {"before": first, "in": last}[side]
    file.write_text("".join([*lines[:at], text, *lines[at:]]), encoding="utf-8")


def statement_of(lines: list[str], name: str) -> tuple[int, int]:
    """Return the indices of the first and the last line of the statement that assigns `name`."""
    for node in ast.parse("".join(lines)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assert node.end_lineno is not None
            return node.lineno - 1, node.end_lineno - 1
    raise AssertionError(f"nothing assigns {name}")


def table_of(lines: list[str], heading: str) -> tuple[int, int]:
    """Return the index of the first line of the table under a heading, and that of the line after the table."""
    under = next(number for number, line in enumerate(lines) if line.lstrip("#") == f" {heading}\n")
    first = next(number for number in range(under, len(lines)) if lines[number].startswith("|"))
    last = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    return first, last


def copied(tree: Path) -> Path:
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    return tree


def test_every_recipe_with_code_is_tried() -> None:
    assert {name for name, _ in sections()} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works_from_its_first_to_its_last_step(name: str, tmp_path: Path) -> None:
    tree = copied(tmp_path / "tree")
    blocks = list(BLOCK.finditer(dict(sections())[name]))
    assert blocks, "a recipe without a block whose first line names a file"
    for block in blocks:
        apply(block, tree)
    recipe = RECIPES[name]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", *recipe.tests]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert recipe.proof in done.stdout, "no test runs for the new thing"
