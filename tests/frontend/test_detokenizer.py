"""Tokens to text while they come: equal to the full decode, never half a character."""

import json
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from kvmesh.frontend.detokenizer import (
    REPLACEMENT,
    ByteLevelDecoder,
    PieceDecoder,
    WindowDecoder,
    token_decoder,
)
from tests.frontend import tiny
from tests.support.budget import examples

KINDS: dict[str, tuple[Callable[[], Backend], type]] = {
    "byte level": (tiny.byte_level, ByteLevelDecoder),
    "metaspace": (tiny.metaspace, PieceDecoder),
    "byte fallback, stripped": (tiny.byte_fallback, PieceDecoder),
    "byte fallback": (tiny.byte_fallback_unstripped, PieceDecoder),
    "word piece": (tiny.word_piece, WindowDecoder),
}
BUILT = {name: (build(), kind) for name, (build, kind) in KINDS.items()}
DECODERS = {
    name: token_decoder(backend, json.loads(backend.to_str())["decoder"]) for name, (backend, _) in BUILT.items()
}


@pytest.mark.parametrize("name", KINDS)
def test_each_type_gets_the_decoder_that_knows_it(name: str) -> None:
    assert type(DECODERS[name]) is BUILT[name][1]


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@settings(max_examples=examples(200))
def test_the_pieces_are_the_full_decode_however_they_are_pushed(name: str, data: st.DataObject) -> None:
    backend = BUILT[name][0]
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 2), max_size=40))
    stream, text, done = DECODERS[name].stream(), "", 0
    while done < len(ids):
        pushed = ids[done : done + data.draw(st.integers(1, 4) | st.just(40))]
        texts = stream.plain_texts() if data.draw(st.booleans()) else None
        plain = [texts[token] for token in pushed] if texts is not None else [b""]
        text += stream.push(pushed) if b"" in plain else json.loads(b'"' + b"".join(plain) + b'"')
        done += len(pushed)
    assert text + stream.flush() == backend.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(("name", "token", "text"), [("byte level", "Ġfox", b" fox"), ("byte fallback", "fox", b"fox")])
def test_plain_texts_are_whole_characters_and_nothing_else(name: str, token: str, text: bytes) -> None:
    backend, stream = BUILT[name][0], DECODERS[name].stream()
    word = backend.token_to_id(token)
    part_of_a_character = backend.encode("🦊", add_special_tokens=False).ids[-2]
    stream.push([word])
    texts = stream.plain_texts()
    assert texts is not None
    assert texts[word] == text
    for nothing in (special_ids(backend)[0], 10**6, part_of_a_character):
        assert texts[nothing] == b""
    stream.push([part_of_a_character])
    assert stream.plain_texts() is None, "they would go before what has begun"
    assert stream.push([word]).endswith("fox")


SHOWN = ["<|im_start|>", "<|im_end|>", "</s>", "not a token", "fox"]


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@settings(max_examples=examples(100))
def test_special_tokens_that_are_asked_for_are_text_like_others(name: str, data: st.DataObject) -> None:
    backend = BUILT[name][0]
    shown = frozenset(data.draw(st.sets(st.sampled_from(SHOWN))))
    hidden = {backend.token_to_id(token) for token in tiny.SPECIAL if token not in shown}
    hidden |= {backend.token_to_id(token) for token in ("<unk>", "[UNK]") if token in special_names(backend)}
    ids = data.draw(
        st.lists(st.integers(0, backend.get_vocab_size() + 2) | st.sampled_from(special_ids(backend)), max_size=30)
    )
    cut = data.draw(st.integers(0, len(ids)))
    stream = DECODERS[name].stream(shown)
    text = stream.push(ids[:cut]) + "".join([stream.push([i]) for i in ids[cut:]]) + stream.flush()
    assert text == backend.decode([i for i in ids if i not in hidden], skip_special_tokens=False)


def special_names(backend: Backend) -> set[str]:
    return {token.content for token in backend.get_added_tokens_decoder().values() if token.special}


def special_ids(backend: Backend) -> list[int]:
    return sorted(backend.token_to_id(name) for name in special_names(backend))


@pytest.mark.parametrize(("name", "token"), [("byte level", "Ġfox"), ("byte fallback", "fox")])
def test_unknown_tokens_of_a_worker_take_no_memory(name: str, token: str) -> None:
    stream = DECODERS[name].stream()
    stream.push([BUILT[name][0].token_to_id(token)])
    texts = stream.plain_texts()
    assert texts is not None
    tracemalloc.start()
    for unknown in range(10**6, 10**6 + 20_000):
        assert stream.push([unknown]) == ""
        assert stream.push([unknown, unknown]) == ""
        assert texts[unknown] == b""
    taken_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken_bytes < 50_000


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
@given(st.text(max_size=20))
def test_no_half_characters_in_real_text(name: str, text: str) -> None:
    backend = BUILT[name][0]
    ids = backend.encode(text, add_special_tokens=False).ids
    stream = DECODERS[name].stream()
    pieces = [stream.push([token]) for token in ids] + [stream.flush()]
    assert "".join(pieces) == backend.decode(ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_of_four_bytes_comes_in_one_piece() -> None:
    ids = tiny.byte_fallback().encode("🦊a").ids
    stream = DECODERS["byte fallback"].stream()
    assert [stream.push([token]) for token in ids] == ["", "", "", "", "🦊a"]


def test_special_tokens_do_not_show_but_added_ones_do() -> None:
    backend = BUILT["byte level"][0]
    ids = [backend.token_to_id(token) for token in ("<|im_end|>", "<think>", "two words")]
    assert DECODERS["byte level"].stream().push(ids) == "<think>two words"


def test_token_bytes_are_exact_for_parts_of_characters() -> None:
    for name in ("byte level", "byte fallback"):
        ids = BUILT[name][0].encode("🦊", add_special_tokens=False).ids
        assert b"".join([DECODERS[name].token_bytes(token) for token in ids]).decode() == "🦊"
        assert DECODERS[name].token_bytes(10**6) == b""


def test_a_decoder_with_unknown_steps_goes_through_the_window() -> None:
    backend = Backend(models.BPE())
    backend.decoder = decoders.Sequence([decoders.Strip("_", 0, 1), decoders.ByteFallback()])
    assert type(token_decoder(backend, json.loads(backend.to_str())["decoder"])) is WindowDecoder
    assert type(token_decoder(backend, None)) is WindowDecoder
