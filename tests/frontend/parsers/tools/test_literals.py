"""Python literals, as models write them, in JSON."""

import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.frontend.parsers.tools.literals import json_of_literal
from tests.support.budget import examples

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(values)
def test_what_python_writes_is_read_as_the_same_value(value: object) -> None:
    written = json_of_literal(repr(value))
    assert written is not None
    assert json.loads(written) == value


@pytest.mark.parametrize(
    "text",
    [
        r"'a\'b\n\x41\u00e9\U0001f642\101'", "('a' 'b')", "(1, 2)", "(1,)", "(1)", "()", "[1, 2,]", "+5", "1_000",
        ".5", "5.", "1e5", "-1E-3", '"""long"""',
    ],
)  # fmt: skip
def test_python_and_we_agree(text: str) -> None:
    written = json_of_literal(text)
    assert written is not None
    assert json.loads(written) == json.loads(json.dumps(ast.literal_eval(text)))


def test_words_of_json_are_read_too_and_keys_become_strings() -> None:
    assert json_of_literal("{1: true, 'b': null}") == '{"1": true, "b": null}'


def test_a_backslash_that_escapes_nothing_stays() -> None:
    assert json_of_literal(r"'\d+'") == r'"\\d+"'


def test_two_halves_of_a_surrogate_pair_are_one_character() -> None:
    assert json_of_literal(r"'\ud83d\ude42'") == '"🙂"'
    assert json_of_literal(r"'\ud83d'") == r'"\ud83d"'


@pytest.mark.parametrize(
    "text",
    [
        "", "f(1)", "a", "[1, 2", "[1 2]", "{'a'}", "'open", "1 + 2", "[x for x in y]", "f'x'", "b'x'", "1j", "1.e999",
        "nan", "__import__('os')", "'a'.b", "lambda: 1", "9" * 5000, "[" * 1000 + "]" * 1000, "-" * 5000, "{1: }",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    assert json_of_literal(text) is None


@given(st.text("[](){}'\"\\,:0123456789.eE-+_ TrueNoneabcx\n", max_size=40))
@settings(max_examples=examples(300))
def test_no_literal_makes_it_fail_and_output_is_json(text: str) -> None:
    written = json_of_literal(text)
    if written is not None:
        json.loads(written)
