"""The comparison with vendors' facts finds what it is there to find."""

from typing import Any

import pytest

from tests.frontend.vendor_fields import FOLDER, differences, facts

APIS = sorted(file.stem for file in FOLDER.glob("*.csv"))
TEXT: dict[str, Any] = {"type": "text", "text": "hi"}


@pytest.mark.parametrize("api", APIS)
def test_every_object_that_a_field_holds_has_facts(api: str) -> None:
    objects = facts(api)
    held = {fact.holds for fields in objects.values() for fact in fields.values() if fact.holds}
    families = {name.partition(":")[0] for name in objects}
    assert held <= families, "add lines for these objects, or NAME:TYPE for each of their types"


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (TEXT, None),
        (TEXT | {"citations": None}, "block:text.citations: the vendor does not send it"),
        (TEXT | {"text": None}, "block:text.text: it is null"),
        (TEXT | {"mood": "good"}, "block:text.mood: the vendor has no such field"),
        ({"type": "text"}, "block:text.text: it is missing"),
        ({"type": "poem"}, "block: there are no facts on block"),
    ],
    ids=str,
)
def test_each_kind_of_difference_is_a_sentence(block: dict[str, Any], problem: str | None) -> None:
    assert differences("messages", "block", block) == ([problem] if problem else [])


def test_an_object_inside_another_is_compared_as_well() -> None:
    event = {"type": "content_block_start", "index": 0, "content_block": TEXT | {"citations": None}}
    [problem] = differences("messages", "event", event)
    assert problem == "event:content_block_start.content_block.citations: the vendor does not send it"
