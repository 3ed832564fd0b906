"""`python -m tests.size` measures the code base, and every file counts once."""

import ast
import json
from pathlib import Path

import pytest

from tests import size
from tests.test_import_order import MAY_USE, Import


@pytest.mark.long
def test_the_report_has_all_sizes_and_no_circle(capsys: pytest.CaptureFixture[str]) -> None:
    assert size.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["import circles"] == report["arrows up"] == report["arrows from the core to an extension"] == 0
    lines = report["lines"]
    assert lines["core"] + lines["extensions"] + lines["laboratory"] == lines["without tests"]
    assert all(report[name] for name in ("modules", "metrics", "words of docs"))
    assert report["settings"]["core"] > 100


def test_folders_of_extensions_are_no_core() -> None:
    assert size.part_of("frontend/keys/caller.py") == "extensions"
    assert size.part_of("frontend/service.py") == "core"
    assert size.part_of("lab/soak.py") == "laboratory"


def test_links_to_the_folders_count_no_file_twice() -> None:
    files = [Path(file).resolve() for file in size.files_of(MAY_USE)]
    assert len(files) == len(set(files))


def test_a_setting_counts_where_it_is_declared() -> None:
    source = """
class Base(Struct):
    port: Annotated[int, Meta(description="port")] = 1
    model: Model = ""
class Service(Base):
    role: Annotated[str, Meta(description="role")] = ""
    patience_s: Annotated[float, Meta(gt=0)] = 1.0
    names: ClassVar[tuple[str, ...]] = ()
class Message(Struct):
    text: str
"""
    assert size.settings_in(ast.parse(source)) == 3


def test_each_circle_counts_once() -> None:
    pairs = [("a", "b"), ("b", "a"), ("c", "d"), ("d", "c"), ("a", "c")]
    assert len(size.circles([Import(one, other, 1) for one, other in pairs])) == 2
