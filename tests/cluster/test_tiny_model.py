"""The committed checkpoint is a complete Hugging Face folder, and its corpus can be made again."""

import itertools
import json
import random

import pytest

from cluster.tiny_model import CHECKPOINT_DIR
from cluster.tiny_model.chats import conversation
from cluster.tiny_model.corpus import SPECIAL_TOKENS, documents, render
from cluster.tiny_model.grammar import expand

tokenizers = pytest.importorskip("tokenizers")
jinja2 = pytest.importorskip("jinja2")


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))


def test_the_seed_decides_the_corpus() -> None:
    first, again, other = (list(itertools.islice(documents(seed), 50)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_no_document_has_an_open_choice_or_slot() -> None:
    for text in itertools.islice(documents(1), 500):
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "")
        assert not set(text) & set("{}[]|")


def test_an_article_fits_the_word_that_follows() -> None:
    assert expand(random.Random(0), "A [animal] and a user", {"animal": "owl"}) == "An owl and a user"


def test_a_conversation_alternates_and_ends_with_an_answer() -> None:
    rng = random.Random(5)
    for _ in range(100):
        roles = [m["role"] for m in conversation(rng) if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert 1 <= len(roles) // 2 <= 4


def test_config_tokenizer_and_special_tokens_agree(tokenizer) -> None:
    config = json.loads((CHECKPOINT_DIR / "config.json").read_text())
    settings = json.loads((CHECKPOINT_DIR / "tokenizer_config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 2048
    assert settings["eos_token"] == "<|im_end|>"
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(token).ids == [tokenizer.token_to_id(token)]


TEXTS = ["Hello there.", "  two  spaces\n\ttab", "naïve café", "🙂👩‍🚀", "你好，世界", "\x00\x7f"]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_the_tokenizer(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_byte_is_a_token(tokenizer) -> None:
    vocab = tokenizer.get_vocab()
    assert all(letter in vocab for letter in tokenizers.pre_tokenizers.ByteLevel.alphabet())


def rendered(messages: list[dict], **options: bool) -> str:
    template = (CHECKPOINT_DIR / "chat_template.jinja").read_text(encoding="utf-8")
    return jinja2.Environment().from_string(template).render(messages=messages, **options)


def test_the_chat_template_writes_chatml_with_system_messages_anywhere() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
    ]
    assert rendered(messages, add_generation_prompt=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_corpus_is_rendered_as_the_chat_template_does() -> None:
    messages = conversation(random.Random(3))
    assert rendered(messages) == render(messages)


def test_both_copies_of_the_chat_template_are_the_same() -> None:
    settings = json.loads((CHECKPOINT_DIR / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == (CHECKPOINT_DIR / "chat_template.jinja").read_text(encoding="utf-8")


def test_the_folder_stays_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT_DIR.iterdir()) < 5_000_000


def test_the_weights_are_bfloat16_with_the_configs_shapes() -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(CHECKPOINT_DIR / "model.safetensors", framework="np") as weights:
        names = set(weights.keys())
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert (embedding.get_shape(), embedding.get_dtype()) == ([2048, 192], "BF16")
    assert "lm_head.weight" not in names  # tied to the embedding
    assert {f"model.layers.{i}.self_attn.q_norm.weight" for i in range(4)} <= names
