"""Running a parser over a text cut into pieces, and texts that are hard to cut."""

from collections.abc import Sequence

from hypothesis import strategies as st

from kvmesh.frontend.parsers.chain import merge
from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Event, Parser


def run(parser: Parser, pieces: Sequence[str]) -> list[Event]:
    """All events of an answer, joined."""
    return merge([*(event for piece in pieces for event in parser.push(piece)), *parser.flush()])


def call(index: int, name: str, arguments: str, call_id: str | None = None) -> list[Event]:
    return [CallBegun(index, name, call_id), CallArguments(index, arguments)]


def texts(*parts: str) -> st.SearchStrategy[str]:
    """Texts made of `parts`, of beginnings and endings of them, and of anything else."""
    whole = st.sampled_from(parts)
    broken = whole.flatmap(lambda part: st.integers(1, len(part)).map(lambda n: part[:n]))
    tails = whole.flatmap(lambda part: st.integers(0, len(part) - 1).map(lambda n: part[n:]))
    other = st.one_of(st.sampled_from(["\n", "\n\n", " ", "<", "a", "é漢🙂"]), st.text(max_size=4))
    return st.lists(st.one_of(whole, whole, broken, tails, other), max_size=12).map("".join)


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    """Pieces of `text`, some of them empty."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
