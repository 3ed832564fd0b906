"""The options as a page of their own, on which a person picks another one. Pure: one file, no network."""

from pathlib import Path
from string import Template

import msgspec

from profiler.picks import Picks

MAX_POINTS = 2000
_TEMPLATE = Path(__file__).with_name("page.html")


def page_of(picks: Picks, command: str) -> str:
    """`command`: that has made these picks; with `--pick <number>` it writes another one's files."""
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
    """Nothing in a name may end the script it stands in."""
    return json.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("\u2028", "\\u2028")
