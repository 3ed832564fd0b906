"""`kvmesh top` in a narrow terminal: figures and names are whole."""

import io

import pytest
from rich.console import Console

from kvmesh.commands.http_client import beginning_of, refusal_of
from kvmesh.commands.top.view import screen
from kvmesh.frontend.live.fold import ShownMesh, ShownStream, ShownWorker
from kvmesh.frontend.live.picture import WorkerLook

NAMES = ("127.0.0.1-30000", "decode-17", "prefill-3")


def shown(width: int) -> str:
    mesh = ShownMesh()
    for n, name in enumerate(NAMES):
        look = WorkerLook(
            n=n, state="recovering", requests=2047, queued_tokens=123_456, held_blocks=40, cached_blocks=65_431
        )
        mesh.workers[n] = ShownWorker(n, name, "aggregated", "m", 80, 8, look)
    mesh.streams["x"] = ShownStream(
        "req-0123456789abcdef", "m", 0.0, 131_072, 2047, 16_384, "decode", 98_765, *NAMES[:2]
    )
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(screen(mesh, "", width, 40))
    return console.export_text()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_figure_and_no_name_is_cut(width: int) -> None:
    text = shown(width)
    for whole in (
        *NAMES,
        "2047",
        "123456",
        "65431",
        "50%",
        "131072",
        "98765",
        "2047/16384",
        "aggregated",
        "recovering",
    ):
        assert whole in text, text
    assert "…" not in text


def test_a_404_of_another_program_shows_no_html() -> None:
    error = refusal_of(
        "http://x/ui/events", 404, b"\n<!DOCTYPE html><html><body>Not Found</body></html>", "try another"
    )
    assert str(error) == "http://x/ui/events answered 404: a page of HTML; is this the API?; try another"
    assert beginning_of(b"no\n  such page") == "no such page"
