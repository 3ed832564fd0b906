"""Stop strings: found across pieces, never shown, the same for any pieces."""

import time

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.frontend.stops import StopMatcher

texts = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join([matcher.push(piece) for piece in pieces])
    return shown + matcher.flush(), matcher.hit


def test_a_stop_across_pieces_is_found_and_not_shown() -> None:
    assert run(["STOP"], ["go on S", "T", "OP and more"]) == ("go on ", "STOP")


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["\n\nUser"])
    assert matcher.push("one\n") == "one"
    assert matcher.push("two") == "\ntwo"
    assert matcher.push("\n\nUs") == ""
    assert matcher.push("ual") == "\n\nUsual"


def test_the_stop_ending_first_wins_then_the_longer() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")
    assert run(["bc", "abc"], ["xabcd"]) == ("x", "abc")


def test_after_a_hit_nothing_is_shown() -> None:
    matcher = StopMatcher(["!"])
    assert matcher.push("hi! there") == "hi"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_repetitive_text_costs_little_whatever_the_stop_strings() -> None:
    """Text that is held back is not searched again: with 2 ms for a token, other streams would stand still."""
    alike = ["a" * n + "b" + "a" * (700 - n) for n in range(335, 366)]
    matcher = StopMatcher([*alike, "a" * 1000 + "b"])
    began = time.process_time()
    for _ in range(1000):
        matcher.push("aaaa")
    assert matcher.hit is None
    assert time.process_time() - began < 1.0  # it takes 0.1 s, and 2 s if all that is held back were searched


@given(texts, stop_lists, st.data())
def test_any_cutting_gives_the_same(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(stops, pieces) == run(stops, [text]) == run(stops, list(text))


@given(texts, stop_lists)
def test_no_stop_is_ever_shown(text: str, stops: list[str]) -> None:
    shown, hit = run(stops, list(text))
    assert not any(stop in shown for stop in stops)
    assert (hit is None) == (shown == text)
    if hit is not None:
        assert text.startswith(shown + hit)
