"""Measure the code base: `python -m tests.size`, with `--json` for programs.

Every Python file of the packages belongs to the core, an extension of `mesh/extensions.py` or the laboratory.
"""

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from kvmesh.__main__ import COMMANDS, GROUPS
from kvmesh.mesh.extensions import EXTENSIONS
from kvmesh.mesh.metric_list import DECLARED
from tests.test_extensions import arrows_to_extensions
from tests.test_import_order import MAY_USE, ROOT, Import, cycle, imports_of, name_of, order_violations, read_modules

Part = Literal["core", "extensions", "laboratory"]
PARTS: dict[str, Part] = {"lab/": "laboratory"} | {
    f"{folder}/": "extensions" for extension in EXTENSIONS for folder in extension.all_folders
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def part_of(path: str) -> Part:
    """Return the part that owns a file, given its path below the root."""
    return next((part for folder, part in PARTS.items() if path.startswith(folder)), "core")


def measure() -> dict[str, Any]:
    """Return every size of the code base, in the order of the report."""
    files = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files_of(MAY_USE)}
    trees = {path: ast.parse(text) for path, text in files.items()}
    lines = Counter[str]()
    for path, text in files.items():
        lines[part_of(path)] += text.count("\n")
    lengths = sorted(length for tree in trees.values() for length in function_lengths(tree))
    settings = {path: settings_in(trees[path]) for path, text in files.items() if "description=" in text}
    imports = imports_of(read_modules(), frozenset(name_of(init) for init in ROOT.glob("*/**/__init__.py")))
    arrows = arrows_to_extensions(imports)
    return {
        "lines": {
            **{part: lines[part] for part in ("core", "extensions", "laboratory")},
            "without tests": lines.total(),
            "deploy": sum(text.count("\n") for text in texts(files_of(["deploy"]))),
            "tests": sum(text.count("\n") for text in texts(files_of(["tests"]))),
        },
        "modules": len(files),
        "settings": {
            **{part: sum(count for path, count in settings.items() if part_of(path) == part) for part in lines},
            "total": sum(settings.values()),
        },
        "commands": {"listed": sum(len(group) for group in GROUPS.values()), "total": len(COMMANDS)},
        "metrics": len(DECLARED),
        "words of docs": sum(len(text.split()) for text in texts(ROOT.glob("docs/**/*.md"))),
        "import circles": len(circles(imports)),
        "arrows up": len(order_violations(imports)),
        "arrows from the core to an extension": len(arrows),
        "lines of a function": {"p90": lengths[int(0.9 * len(lengths))], "longest": lengths[-1]},
    }


def files_of(folders: Iterable[str]) -> list[Path]:
    """Return the Python files of folders below the root. Links are not followed, so each file counts once."""
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def texts(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        yield file.read_text(encoding="utf-8")


def function_lengths(tree: ast.Module) -> list[int]:
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    return [(function.end_lineno or 0) - function.lineno + 1 for function in functions]


def settings_in(tree: ast.Module) -> int:
    """Count the settings that a module declares: fields of its structs whose type carries a description for `--help`.

    A type with a name of its own, as `LogLevel`, has its description elsewhere. An inherited setting counts where it is
    declared, and a struct without any description is no schema of settings.
    """
    structs = [
        [ast.unparse(field.annotation) for field in node.body if isinstance(field, ast.AnnAssign)]
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    schemas = [types for types in structs if any("description=" in text for text in types)]
    return sum(
        "description=" in text or (text.isidentifier() and text[0].isupper()) for types in schemas for text in types
    )


def circles(imports: Sequence[Import]) -> list[list[str]]:
    """Return circles of imports that share no edge; none if there is no circle."""
    rest, found = list(imports), []
    while circle := cycle(rest):
        found.append(circle)
        edges = set(zip(circle, [*circle[1:], circle[0]], strict=True))
        rest = [one for one in rest if (one.importer, one.target) not in edges]
    return found


def as_text(sizes: dict[str, Any]) -> str:
    """Return the report for people: one size a line."""
    rows = []
    for name, size in sizes.items():
        parts = size.items() if isinstance(size, dict) else [("", size)]
        rows += [f"{name + (': ' + part if part else ''):<40} {value:>8,}" for part, value in parts]
    return "\n".join(rows)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.size", description="Measure the code base.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(argv)
    sizes = measure()
    print(json.dumps(sizes, indent=2) if chosen.json else as_text(sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
