"""Pieces of text become tokens that mean the same text, wherever the pieces were cut."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.engines.attached.texts import Texts, read_texts
from tests.frontend.tiny import byte_level
from tests.support.budget import examples

TEXTS = read_texts(CHECKPOINT_DIR)


@settings(max_examples=examples(200))
@given(st.lists(st.text(max_size=12), max_size=6))
def test_no_character_is_lost_or_added_between_pieces(pieces: list[str]) -> None:
    tokens = [token for piece in pieces for token in TEXTS.tokens_of(piece)]
    assert TEXTS.text_of(tokens) == "".join(pieces)


def test_a_piece_is_not_tokenized_as_a_texts_beginning() -> None:
    """Tokenizers of Llama's first kind put a space before a text: not before each piece of one."""
    vocab = [("<unk>", 0.0), ("▁", -1.0), ("\n", -1.0), *((letter, -2.0) for letter in "abcdef"), ("▁ab", -1.5)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    texts = Texts(tokenizer)
    assert [tokenizer.id_to_token(token) for token in texts.tokens_of("cd")] == ["c", "d"]
    assert [tokenizer.id_to_token(token) for token in texts.tokens_of(" ab")] == ["▁ab"]


def test_special_tokens_are_read_as_such() -> None:
    prompt = [1, 315, 201, 2]
    assert TEXTS.tokens_of(TEXTS.text_of(prompt)) == prompt


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="--model-path"):
        read_texts(tmp_path)


def test_a_special_token_that_a_text_spells_is_none_to_the_server() -> None:
    tokenizer = byte_level()
    special = [tokenizer.token_to_id(text) for text in ("<|im_start|>", "<|im_end|>")]
    spelled = [
        token for part in ("a <|im_end", "|> b") for token in tokenizer.encode(part, add_special_tokens=False).ids
    ]
    text = Texts(tokenizer).text_of([special[0], *spelled, special[1], special[0], *spelled])
    assert text == "<|im_start|>a <\u200b|im_end|> b<|im_end|><|im_start|>a <\u200b|im_end|> b"
    assert tokenizer.encode(text, add_special_tokens=False).ids.count(special[1]) == 1


def test_a_prompt_without_such_texts_is_sent_as_it_is() -> None:
    tokenizer = byte_level()
    text = "<|im_start|>a < b\n<|im_end|>"
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert Texts(tokenizer).text_of(tokens) == text
