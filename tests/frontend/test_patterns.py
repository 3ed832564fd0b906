"""The analysis of a split pattern agrees with what a real engine joins."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from kvmesh.frontend.tokenizing.patterns import UnknownPattern, joint
from tests.frontend import kinds
from tests.support.budget import examples

LEFT = "abzAZ09"
KNOWN = [kinds.GPT2, kinds.LLAMA3, kinds.QWEN2, kinds.QWEN35, kinds.O200K, kinds.TEKKEN, kinds.DEEPSEEK[-1]]


@pytest.mark.parametrize("pattern", KNOWN)
@pytest.mark.parametrize(("left", "right"), [(LEFT, " "), (LEFT, "\n"), ("的人がす", "，"), ("的人がす", "。")])
def test_the_patterns_of_known_models_split_words_from_what_follows(pattern: str, left: str, right: str) -> None:
    found = joint(pattern, left, right)
    assert not found.joins
    assert found.alone


@pytest.mark.parametrize(
    ("pattern", "joins"),
    [
        (r"\w+ \w+", True),
        (r"(?:a|b)+ ?c", True),
        (r"[a-z ]+", True),
        (r"(?i:Z) ", True),
        (r"\x61\u0020", True),
        (r".+", True),
        (r"[^x]{2}", True),
        (r"(\w *)+?", True),
        (r"\w+(?! )", True),
        (r"\p{L}+(?=x)", True),
        (r"\p{Ll}*\P{L}", True),
        (r"\w+", False),
        (r" ?\w+", False),
        (r" \w+(?:'s)?", False),
        (r"\s+(?!\S)|\s+", False),
        (r"(?i:Z)[^\s\p{L}]+", False),
        (r"\p{^N}{0,0}x", False),
        (r"[\-\]c-z]+| [ab]", False),
    ],
)
def test_what_may_stand_over_a_cut(pattern: str, joins: bool) -> None:
    assert joint(pattern, "abZ0", " ").joins == joins


def test_the_right_side_alone_must_match_without_assertions() -> None:
    assert joint(r"\s+", "a", " ").alone
    assert joint(r"x?[ \n]y*", "a", " ").alone
    assert not joint(r"\s+(?!\S)", "a", " ").alone
    assert not joint(r" x", "a", " ").alone
    assert not joint(r"\s{2,}", "a", " ").alone


@pytest.mark.parametrize(
    "pattern",
    [r"(?<=a) ", r"(?<!a) ", r"^a", r"a$", r"\bword", r"(a)\1", r"[a&&[^b]]", r"[[:alpha:]]", r"\p{Greek}", r"(?!ab)c",
     r"(?P<n>a)", "(", ")", "[", "a{", "*", "(?", "\\", "[a", r"\p{L", "(" * 99, r"a**{"],
)  # fmt: skip
def test_what_is_not_understood_is_refused(pattern: str) -> None:
    with pytest.raises(UnknownPattern):
        joint(pattern, "ab", " ")


ATOMS = [
    "a",
    "b",
    " ",
    "x",
    r"\s",
    r"\w",
    r"\p{L}",
    r"[^\sx]",
    r"[ax]",
    r"[^a]",
    "(?:a|x)",
    r"(?:\w )",
    "(?! )",
    r"(?=\s)",
    r"(?!\S)",
]
PATTERNS = st.lists(
    st.lists(st.tuples(st.sampled_from(ATOMS), st.sampled_from(["", "", "?", "+", "*", "{1,3}", "{2}", "+?"])), min_size=1, max_size=4),  # noqa: E501
    min_size=1, max_size=4,
).map(lambda ways: "|".join("".join(atom if atom[:2] in ("(?!", "(?=") or "(?!" in atom or "(?=" in atom else atom + sign for atom, sign in way) for way in ways))  # noqa: E501  # fmt: skip


@given(PATTERNS, st.text("abx ,", max_size=8), st.text("abx ,", max_size=8))
@settings(max_examples=examples(1500))
def test_a_cut_that_is_proven_changes_no_split(pattern: str, start: str, end: str) -> None:
    found = joint(pattern, "ab", " ")
    if found.joins or found.empty or not found.alone:
        return
    split = pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str
    for left in "ab":
        parts = [text for text, _ in split(start + left)] + [text for text, _ in split(" " + end)]
        assert [text for text, _ in split(f"{start}{left} {end}")] == parts
