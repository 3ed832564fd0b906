"""No lane of tests goes unrun without a record: docs/lanes.md, and what writes it."""

import re
from pathlib import Path

import pytest

from deploy import lanes

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "lanes.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `make ([\w-]+)` \|", PAGE, re.MULTILINE)


def test_the_page_names_every_test_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^((?:test|soak|fuzz|check)[\w-]*):", MAKEFILE, re.MULTILINE))
    assert targets - set(re.findall(r"`make ([\w-]+)`", PAGE)) == set()


def test_the_weekly_lane_runs_every_row_of_the_page() -> None:
    weekly = re.search(r"^LANES \?= (.+)$", MAKEFILE, re.MULTILINE)
    assert weekly is not None and weekly[1].split() == ROWS


def test_a_lane_is_in_the_table_or_in_the_run_of_every_change() -> None:
    every_change = set(re.findall(r"run_tests ([\w-]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8")))
    targets = set(re.findall(r"^((?:test|soak|fuzz)[\w-]*):", MAKEFILE, re.MULTILINE))
    assert targets - every_change - set(ROWS) == {"test-all", "test-weekly"}


def test_a_green_run_replaces_the_record_of_its_lane_alone() -> None:
    page = "| `make soak` | old | | | |\n| `make soaks` | old | | | |\n"
    assert lanes.with_record(page, "soak", "abc | today | fine | 3 s") == (
        "| `make soak` | abc | today | fine | 3 s |\n| `make soaks` | old | | | |\n"
    )


def test_a_lane_without_a_row_is_refused() -> None:
    with pytest.raises(SystemExit, match="add the row"):
        lanes.with_record(PAGE, "test-nothing", "")


def test_the_closing_line_is_the_last_result() -> None:
    output = ["3 passed in 1.0s\n", "\x1b[32m==== 17 passed, 1 skipped in 240.1s ====\x1b[0m\n", "make: done\n", "\n"]
    assert lanes.closing_line(output) == "17 passed, 1 skipped in 240.1s"
