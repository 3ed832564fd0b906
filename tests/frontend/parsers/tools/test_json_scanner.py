"""The scanner finds where a value of JSON that arrives in pieces ends, and where it stops being JSON."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.frontend.parsers.text import MAX_JSON_DEPTH, JsonScanner, MarkerFinder, is_json, quoted
from tests.support.budget import examples

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
pieces_of_json = st.sampled_from(
    [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"',
        '"a"',
        "\\",
        "\\u00e9",
        "\\x",
        "1",
        "-",
        "0",
        ".5",
        "e3",
        "true",
        "nul",
        " ",
        "\n",
    ]
)


def read(text: str, size: int) -> tuple[str, int, JsonScanner]:
    scanner = JsonScanner()
    told = []
    at = 0
    while at < len(text):
        fragment, stop = scanner.feed(text, at, min(len(text), at + size))
        told.append(fragment)
        if scanner.done or scanner.broken:
            return "".join(told), stop, scanner
        at = stop
    return "".join(told), at, scanner


@given(values, st.booleans(), st.integers(1, 5))
def test_a_value_passes_unchanged_and_ends_where_it_ends(value: object, ascii_only: bool, size: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1)
    told, stop, scanner = read(text + "\n!", size)
    assert (told.strip(), scanner.done) == (text, True)
    assert stop == len(text)


@given(st.lists(pieces_of_json, max_size=14).map("".join))
@settings(max_examples=examples(400))
def test_it_agrees_with_the_standard_library_on_what_is_json(text: str) -> None:
    try:
        json.loads(text)
        expected = True
    except ValueError:
        expected = False
    assert is_json(text) == expected


@given(st.lists(pieces_of_json, max_size=14).map("".join), st.integers(1, 6))
def test_how_it_is_cut_does_not_matter(text: str, size: int) -> None:
    assert read(text, size)[:2] == read(text, len(text) + 1)[:2]


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("{'a': 1}", 1),
        ('{"a": 1,}', 8),
        ('{"a" 1}', 5),
        ("[1 2]", 3),
        ("[01]", 3),
        ("[NaN]", 1),
        ('["\\d"]', 3),
        ("[1}", 2),
        ("[truth]", 6),
    ],
)
def test_it_stops_at_the_character_that_cannot_stand_there(text: str, stop: int) -> None:
    _, at, scanner = read(text, 1)
    assert (at, scanner.broken) == (stop, True)


def test_control_characters_in_strings_are_escaped() -> None:
    assert read('{"a\t":\n"b\nc\x01"}', 1)[0] == '{"a\\t":\n"b\\nc\\u0001"}'


def test_depth_is_bounded() -> None:
    assert is_json("[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH)
    assert not is_json("[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1))


def test_a_quoted_text_can_always_be_encoded() -> None:
    assert quoted("a\n漢") == '"a\\n漢"'
    assert quoted("half \ud83d").encode() == b'"half \\ud83d"'


def test_the_first_marker_or_its_possible_beginning_is_found() -> None:
    finder = MarkerFinder(["<a>", "\n</x>", "</x>"])
    assert finder.find("..<a></x>") == (2, "<a>")
    assert finder.find("..\n</x>") == (2, "\n</x>")
    assert finder.find("..\n</") == (2, "")
    assert finder.find("..\n.") == (4, "")
    assert finder.find("<a>..", 1) == (5, "")
