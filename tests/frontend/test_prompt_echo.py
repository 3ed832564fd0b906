"""A prompt is echoed whole, with the place of each token in it, however its logprobs are cut."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from kvmesh.frontend.answer import Part, PlacedLogprob
from kvmesh.frontend.echo import PromptEcho
from kvmesh.frontend.tokenizer import Tokenizer
from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.messages import TokenLogprob, pack_tokens
from tests.frontend import tiny
from tests.support.budget import examples

KINDS = {
    "byte level": tiny.byte_level(),
    "metaspace": tiny.metaspace(),
    "byte fallback": tiny.byte_fallback(),
    "not stripped": tiny.byte_fallback_unstripped(),
    "word piece": tiny.word_piece(),
}
TOKENIZERS = {name: Tokenizer.from_json(kind.to_str().encode()) for name, kind in KINDS.items()}
TEXTS = st.one_of(st.sampled_from(tiny.CORPUS), st.text(alphabet="ab fox.\né東🦊", min_size=1, max_size=40))


def tokens_of(kind: HfTokenizer, text: str) -> list[int]:
    return list(kind.encode(text).ids)


def scores(tokens: Sequence[int]) -> list[TokenLogprob]:
    return [TokenLogprob(token, -1.0) for token in tokens[1:]]


def echoed(name: str, tokens: Sequence[int], text: str, cuts: Sequence[int] = ()) -> list[Part]:
    """Give the logprobs in parts that end at `cuts`, and then the end."""
    echo = PromptEcho(TOKENIZERS[name], pack_tokens(tokens), text)
    given = scores(tokens)
    ends = sorted({cut for cut in cuts if 0 < cut < len(given)} | ({len(given)} if given else set()))
    parts = [echo.take(given[first:last]) for first, last in itertools.pairwise([0, *ends])]
    return [*parts, echo.finish()]


def placed(parts: Sequence[Part]) -> list[PlacedLogprob]:
    return [each for part in parts for each in part.logprobs]


@given(st.sampled_from(list(KINDS)), TEXTS, st.lists(st.integers(1, 40), max_size=4))
@settings(max_examples=examples(200))
def test_the_parts_are_the_prompt_and_each_token_has_a_place(name: str, text: str, cuts: list[int]) -> None:
    if not (tokens := tokens_of(KINDS[name], text)):
        return
    parts = echoed(name, tokens, text, cuts)
    assert "".join(part.text for part in parts) == text
    assert [each.entry.token_id for each in placed(parts)] == tokens
    offsets = [each.offset_chars for each in placed(parts)]
    assert offsets == sorted(offsets)
    assert 0 <= offsets[0] <= offsets[-1] <= len(text)
    assert placed(parts) == placed(echoed(name, tokens, text)), "wherever it is cut"


@given(TEXTS)
@settings(max_examples=examples(100))
def test_places_are_exact_where_tokens_are_bytes_of_the_text(text: str) -> None:
    kind = KINDS["byte level"]
    tokens = tokens_of(kind, text)
    offsets = [each.offset_chars for each in placed(echoed("byte level", tokens, text))]
    assert offsets[:2] == [0, 0], "the token before the text shows nothing"
    for n, offset in enumerate(offsets[1:], 1):
        before = kind.decode(tokens[1:n], skip_special_tokens=False)
        assert len(before.rstrip("\ufffd")) <= offset <= len(before)
        assert text.startswith(before.rstrip("\ufffd"))


def test_a_piece_with_a_space_that_the_text_lacks_begins_at_the_text() -> None:
    tokens = tokens_of(KINDS["metaspace"], "the fox")
    parts = echoed("metaspace", tokens, "the fox")
    fox = next(n for n, token in enumerate(tokens) if "f" in (KINDS["metaspace"].id_to_token(token) or ""))
    assert placed(parts)[fox].offset_chars == len("the")


def test_a_prompt_of_one_token_comes_when_the_answer_begins() -> None:
    [part] = echoed("byte level", tokens_of(KINDS["byte level"], ""), "")
    assert [each.of_prompt for each in part.logprobs] == [True]


def test_wrong_logprobs_are_an_engines_failure() -> None:
    tokens = tokens_of(KINDS["byte level"], "the fox")
    packed = pack_tokens(tokens)
    for wrong in (scores(tokens)[1:], [*scores(tokens), TokenLogprob(5, -1.0)]):
        with pytest.raises(EngineError, match="other tokens"):
            PromptEcho(TOKENIZERS["byte level"], packed, "the fox").take(wrong)
    echo = PromptEcho(TOKENIZERS["byte level"], packed, "the fox")
    echo.take(scores(tokens)[:1])
    with pytest.raises(EngineError, match=f"2 of the prompt's {len(tokens)}"):
        echo.finish()
