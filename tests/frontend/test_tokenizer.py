"""Text to tokens."""

import asyncio
import threading
from array import array
from pathlib import Path

import pytest
from tokenizers import processors

from kvmesh.frontend.tokenizer import CUT_INLINE_CHARS, Tokenizer, TooManyTokensError
from kvmesh.protocol.errors import ConfigError, InvalidRequestError
from tests.frontend import tiny

BACKENDS = ["hf", "fastokens"]


@pytest.fixture(scope="module", params=BACKENDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny.save_model(tmp_path_factory.mktemp("model")), request.param)


def fresh(backend: str = "auto", **options: int) -> Tokenizer:
    return Tokenizer.from_json(tiny.byte_level().to_str().encode(), backend=backend, **options)


def ids(packed: bytes) -> list[int]:
    return array("I", packed).tolist()


async def test_raw_prompts_get_the_special_tokens_and_chats_do_not(tokenizer: Tokenizer) -> None:
    bare = ids(await tokenizer.encode_packed("the fox", add_special_tokens=False))
    with_bos = ids(await tokenizer.encode_packed("the fox", add_special_tokens=True))
    assert with_bos == [tiny.byte_level().token_to_id("<s>"), *bare] == tiny.byte_level().encode("the fox").ids
    assert tokenizer.decode(with_bos) == "the fox"


@pytest.mark.parametrize("text", ["", "the fox", "the fox lives at the edge of a forest. " * 200])
async def test_special_tokens_go_before_and_after_texts_of_any_length(text: str) -> None:
    backend = tiny.byte_level()
    ends = [("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))]
    before = backend.post_processor
    for template in ("<s> $A </s>", "$A </s>", "<s> <s> $A", "$A", "<s> $A <s> $A"):
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
        tokenizer = Tokenizer.from_json(backend.to_str().encode())
        assert ids(await tokenizer.encode_packed(text, add_special_tokens=True)) == backend.encode(text).ids
    backend.post_processor = before


async def test_special_tokens_in_a_rendered_chat_are_one_token(tokenizer: Tokenizer) -> None:
    packed = await tokenizer.encode_packed("<|im_start|>", add_special_tokens=False)
    assert ids(packed) == [tiny.byte_level().token_to_id("<|im_start|>")]


@pytest.mark.parametrize("text", ["<|im_start|>", "<think>"], ids=["special", "added"])
def test_special_token_ids_are_found_by_their_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.special_token_id(text) == tiny.byte_level().token_to_id(text)


def test_a_word_of_the_vocabulary_is_no_special_token(tokenizer: Tokenizer) -> None:
    assert tiny.byte_level().token_to_id("upon") is not None
    assert tokenizer.special_token_id("upon") is None


def test_only_special_tokens_are_hidden(tokenizer: Tokenizer) -> None:
    assert "<|im_start|>" in tokenizer.special_tokens
    assert "<think>" not in tokenizer.special_tokens


def watched(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Return what the backend is asked for from now on: (on the main thread, characters)."""
    calls: list[tuple[bool, int]] = []
    encode = tokenizer._backend.encode

    def watch(texts: list[str]) -> list[bytes]:
        calls.append((threading.current_thread() is threading.main_thread(), sum(map(len, texts))))
        return encode(texts)

    monkeypatch.setattr(tokenizer._backend, "encode", watch)
    return calls


@pytest.mark.parametrize("backend", BACKENDS)
async def test_long_new_parts_are_encoded_in_a_thread(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = fresh(backend)
    limit = tokenizer._backend.inline_chars
    for chars in (limit - 1, limit, CUT_INLINE_CHARS):
        calls = watched(tokenizer, monkeypatch)
        assert await tokenizer.encode_packed("x" * chars, add_special_tokens=False)
        assert calls == [(chars < limit, chars)]
        monkeypatch.undo()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_of_a_long_known_prompt_only_the_end_is_encoded(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = fresh(backend)
    prefix = "Once upon a time there was a fox. " * 4000
    await tokenizer.encode_packed(prefix, add_special_tokens=False)
    calls = watched(tokenizer, monkeypatch)
    text = prefix + "And then?"
    packed = await tokenizer.encode_packed(text, add_special_tokens=False)
    assert ids(packed) == tiny.byte_level().encode(text, add_special_tokens=False).ids
    assert calls[0][0]  # on the loop
    assert sum(chars for _, chars in calls) < 2 * tokenizer._backend.most_piece_chars


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_text_is_not_tokenized_far_beyond_the_tokens_that_are_wanted(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.frontend.tokenizer.BATCH_CHARS", 20_000)
    tokenizer = fresh(backend)
    text = "".join(f"word {n}\n\n" for n in range(30_000))  # above CUT_INLINE_CHARS
    whole = await tokenizer.encode_packed(text, add_special_tokens=False, salt="whole")
    assert await tokenizer.encode_packed(text, add_special_tokens=False, most_tokens=len(whole) // 4) == whole
    encoded = watched(tokenizer, monkeypatch)
    with pytest.raises(TooManyTokensError) as refused:
        await tokenizer.encode_packed(text, add_special_tokens=False, salt="b", most_tokens=1000)
    assert 1000 < refused.value.num_tokens < len(whole) // 4
    assert sum(num_chars for _, num_chars in encoded) < len(text) / 4


async def test_another_salt_shares_no_cached_piece() -> None:
    tokenizer = fresh()
    text = "Once upon a time there was a fox. " * 1000
    for salt, hits in (("", False), ("", True), ("tenant", False), ("tenant", True)):
        before = tokenizer.cache.hits
        await tokenizer.encode_packed(text, add_special_tokens=False, salt=salt)
        assert (tokenizer.cache.hits > before) == hits


async def test_without_a_cache_the_tokens_are_the_same() -> None:
    text = "Once upon a time there was a fox. " * 1000
    uncached = fresh(cache_bytes=0)
    for _ in range(2):
        packed = await uncached.encode_packed(text, add_special_tokens=True)
        assert packed == await fresh().encode_packed(text, add_special_tokens=True)
    assert len(uncached.cache) == uncached.cache.hits == 0


async def test_the_cache_stays_within_its_bytes() -> None:
    tokenizer = fresh(cache_bytes=100_000)
    for n in range(100):
        await tokenizer.encode_packed(f"{n} fox and hound " * 1000, add_special_tokens=False)
        assert tokenizer.cache.bytes <= 100_000
    assert len(tokenizer.cache) > 2


@pytest.mark.parametrize("text", ["\ud800", "fox " * 3000 + "\udfff", "fox " * 100_000 + "\ud800"])
async def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be tokenized"):
        await tokenizer.encode_packed(text, add_special_tokens=False)


async def test_many_prompts_at_once_are_each_right(tokenizer: Tokenizer) -> None:
    texts = [f"{n} times the fox " * (100 + 2000 * (n % 3)) for n in range(24)]
    packed = await asyncio.gather(*[tokenizer.encode_packed(text, add_special_tokens=True) for text in texts])
    assert [ids(each) for each in packed] == [tiny.byte_level().encode(text).ids for text in texts]


async def test_a_saved_truncation_is_not_obeyed() -> None:
    backend = tiny.byte_fallback()
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    for name in ("hf", "auto"):
        tokenizer = Tokenizer.from_json(backend.to_str().encode(), backend=name)
        assert len(ids(await tokenizer.encode_packed("hello", add_special_tokens=False))) == 4  # h e ll o


def test_a_folder_without_a_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no tokenizer"):
        Tokenizer.load(tmp_path)
