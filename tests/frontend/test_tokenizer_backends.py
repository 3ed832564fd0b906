"""Two libraries, the same tokens; where not, the slower one that is always right."""

import logging
import sys
from array import array
from collections.abc import Sequence
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.frontend.tokenizer import Tokenizer
from kvmesh.frontend.tokenizing import backends
from kvmesh.frontend.tokenizing.backends import FastokensBackend, HfBackend, choose_backend, difference, require_backend
from kvmesh.frontend.tokenizing.probes import HARD_TEXTS, probes
from kvmesh.protocol.errors import ConfigError
from tests.frontend.kinds import KINDS, corpus
from tests.frontend.test_cuts import TEXTS, reference
from tests.support.budget import LARGE, examples

FAST = [
    "gpt2",
    "gpt2 pattern",
    "llama3",
    "qwen2",
    "qwen3.5",
    "o200k",
    "tekken",
    "deepseek",
    "llama2",
    "gemma",
    "deepseek v4",
]


def chosen(name: str, wanted: str = "auto") -> backends.TokenizerBackend:
    return choose_backend(wanted, reference(name), reference(name).to_str(), name)


@cache
def fast(name: str) -> FastokensBackend:
    return FastokensBackend(reference(name).to_str())


def exact(name: str, texts: Sequence[str]) -> list[bytes]:
    return [array("I", reference(name).encode(text, add_special_tokens=False).ids).tobytes() for text in texts]


@pytest.mark.parametrize("name", FAST)
def test_the_types_of_language_models_are_encoded_fast(name: str) -> None:
    assert chosen(name).name == "fastokens"


@pytest.mark.parametrize("name", FAST)
@given(text=st.one_of(TEXTS, st.text(max_size=60)))
@settings(max_examples=examples(150))
def test_both_give_the_same_tokens(name: str, text: str) -> None:
    assert fast(name).encode([text]) == exact(name, [text])


@pytest.mark.budget
@pytest.mark.parametrize("name", FAST)
def test_both_give_the_same_tokens_for_documents(name: str) -> None:
    texts = [*corpus()[: None if LARGE else 8], "".join(HARD_TEXTS) * 5, "a" * 20_000, " " * 20_000, "\x00" * 2000]
    assert fast(name).encode(texts) == exact(name, texts) == HfBackend(reference(name)).encode(texts)


@pytest.mark.parametrize("name", ["unigram", "bert"])
def test_other_models_are_encoded_by_the_reference(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert chosen(name).name == "hf"
    assert "slower than fastokens: it says" in caplog.text
    with pytest.raises(ConfigError, match="set --tokenizer to auto or hf"):
        chosen(name, "fastokens")


def test_one_differing_token_is_reason_enough_not_to_use_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode = FastokensBackend.encode
    monkeypatch.setattr(
        FastokensBackend, "encode", lambda self, texts: [ids[4:] if "Ⅷ" in text else ids
                                                         for text, ids in zip(texts, encode(self, texts), strict=True)]
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        assert chosen("gpt2").name == "hf"
    assert "it differs for" in caplog.text
    with pytest.raises(ConfigError, match="it differs for"):
        chosen("gpt2", "fastokens")


def test_without_the_package_the_reference_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert chosen("gpt2").name == "hf"
    with pytest.raises(ConfigError, match="not installed"):
        chosen("gpt2", "fastokens")


def test_a_missing_tokenizer_package_is_reported_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    require_backend("fastokens")
    monkeypatch.setitem(sys.modules, "fastokens", None)
    for wanted in ("auto", "hf"):
        require_backend(wanted)
    with pytest.raises(ConfigError, match=r"pip install fastokens.*, or set --tokenizer to auto or hf"):
        require_backend("fastokens")


def test_the_reference_is_used_where_it_is_asked_for() -> None:
    assert chosen("gpt2", "hf").name == "hf"
    data = KINDS["gpt2"]().to_str().encode()
    assert Tokenizer.from_json(data, backend="hf").backend_name == "hf"
    assert Tokenizer.from_json(data).backend_name == "fastokens"


def test_the_probes_hold_every_special_token_in_bad_company() -> None:
    texts = probes(["<|im_start|>"])
    assert {"<|im_start|>", "a<|im_start|>b", "<|im_start|><|im_start|>"} <= set(texts)
    assert difference(HfBackend(reference("gpt2")), HfBackend(reference("llama3")), []) != ""


@pytest.mark.parametrize("backend", ["hf", "fastokens"])
def test_no_text_is_an_error_not_a_crash(backend: str) -> None:
    with pytest.raises(Exception, match=r"surrogate|str|Text"):
        chosen("gpt2", backend).encode(["\ud800"])


def test_reading_a_tokenizer_needs_no_other_format(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "tokenizer.json"
    reference("llama3").save(str(path), pretty=True)
    assert Tokenizer.load(tmp_path).backend_name == "fastokens"
    assert tokenizers.Tokenizer.from_file(str(path)).get_vocab_size() == Tokenizer.load(tmp_path).vocab_size
