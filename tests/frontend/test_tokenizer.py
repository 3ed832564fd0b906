"""Text to tokens."""

import threading
from pathlib import Path

import pytest

from frontend.tokenizer import LONG_TEXT_CHARS, Tokenizer
from protocol.errors import ConfigError
from tests.frontend import tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny.save_model(tmp_path_factory.mktemp("model")))


async def test_raw_prompts_get_the_special_tokens_and_chats_do_not(tokenizer: Tokenizer) -> None:
    bare = await tokenizer.encode("the fox", add_special_tokens=False)
    with_bos = await tokenizer.encode("the fox", add_special_tokens=True)
    assert with_bos == [tiny.byte_level().token_to_id("<s>"), *bare]
    assert tokenizer.decode(with_bos) == "the fox"


async def test_special_tokens_in_a_rendered_chat_are_one_token(tokenizer: Tokenizer) -> None:
    ids = await tokenizer.encode("<|im_start|>", add_special_tokens=False)
    assert ids == [tiny.byte_level().token_to_id("<|im_start|>")]


@pytest.mark.parametrize(("chars", "on_loop"), [(LONG_TEXT_CHARS - 1, True), (LONG_TEXT_CHARS, False)])
async def test_long_prompts_are_encoded_in_a_thread(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, chars: int, on_loop: bool
) -> None:
    threads: list[bool] = []
    encode = tokenizer._encode
    monkeypatch.setattr(
        tokenizer,
        "_encode",
        lambda *args: threads.append(threading.current_thread() is threading.main_thread()) or encode(*args),
    )
    assert await tokenizer.encode("x" * chars, add_special_tokens=False)
    assert threads == [on_loop]


async def test_a_saved_truncation_is_not_obeyed() -> None:
    backend = tiny.byte_fallback()
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_json(backend.to_str().encode())
    assert len(await tokenizer.encode("hello", add_special_tokens=False)) == 4  # h e ll o


def test_a_folder_without_a_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no tokenizer"):
        Tokenizer.load(tmp_path)
