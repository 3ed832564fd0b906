"""Stop strings: found across pieces, never shown, the same for any pieces."""

from hypothesis import given
from hypothesis import strategies as st

from frontend.stops import StopMatcher

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


def test_the_stop_that_ends_first_wins_and_of_equals_the_longer() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")
    assert run(["bc", "abc"], ["xabcd"]) == ("x", "abc")


def test_after_a_hit_nothing_is_shown() -> None:
    matcher = StopMatcher(["!"])
    assert matcher.push("hi! there") == "hi"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


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
