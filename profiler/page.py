"""Write all options as an HTML page on which a person can pick one. Pure: one file, no network."""

from pathlib import Path
from string import Template

import msgspec

from kvmesh.profiler.picks import Picks

MAX_POINTS = 2000
_TEMPLATE = Path(__file__).with_name("page.html")


def page_of(picks: Picks, command: str) -> str:
    """Return the page. `command` made these picks; with `--pick <number>` it writes the files of another option."""
    shown = sorted({*picks.front, *_recommended(picks), *range(min(MAX_POINTS, len(picks.options)))})
    data = {
        "goal": picks.goal,
        "points": [{"number": i, "title": picks.options[i].title, "option": picks.options[i]} for i in shown],
        "front": picks.front,
        "recommended": picks.recommended,
        "reasons": picks.reasons,
        "command": command,
    }
    return Template(_TEMPLATE.read_text()).substitute(data=_in_script(msgspec.json.encode(data).decode()))


def _recommended(picks: Picks) -> list[int]:
    return [] if picks.recommended is None else [picks.recommended]


def _in_script(json: str) -> str:
    """Escape characters, so that no name can end the script in which it stands."""
    return json.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("\u2028", "\\u2028")
