"""The documents are true where a program can check them: links, paths and the names of tests."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
HISTORY = {"CHANGELOG.md"}  # describes the past, so its names may be gone
PACKAGES = sorted(folder.name for folder in ROOT.iterdir() if folder.is_dir() and not folder.name.startswith("."))
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(PACKAGES)})/[\w./-]*\w\.(?:py|pyi|md|toml|h|cpp|json|txt|html|yml)\b")
_DEFINITION = re.compile(r"def (test_\w+)\(")
_TEST = re.compile(r"`(test_\w+)`")


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def existing_tests() -> frozenset[str]:
    """Return the names of all test functions and test modules of the repository."""
    files = list(ROOT.glob("tests/**/*.py"))
    functions = {name for file in files for name in _DEFINITION.findall(file.read_text(encoding="utf-8"))}
    return frozenset(functions | {file.stem for file in files})


@pytest.mark.parametrize("page", names(PAGES))
def test_links_between_pages_lead_somewhere(page: str) -> None:
    links = [link for link in _LINK.findall(text_of(page)) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


@pytest.mark.parametrize("page", [name for name in names(PAGES) if name not in HISTORY])
def test_files_that_a_page_names_exist(page: str) -> None:
    assert [path for path in _PATH.findall(text_of(page)) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", [name for name in names(PAGES) if name not in HISTORY])
def test_tests_that_a_page_names_exist(page: str) -> None:
    assert [test for test in _TEST.findall(text_of(page)) if test not in existing_tests()] == []
