"""Read the commands of a guide, so that a test runs what the guide says."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```(?:sh|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def section_of(guide: str, title: str) -> str:
    """Return the text of the section `## title` in docs/<guide>. Raise LookupError if the guide has no such section."""
    text = (DOCS / guide).read_text()
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"docs/{guide} has no section {title!r}")
    return found[1]


def commands_of(guide: str, title: str) -> list[str]:
    """Return the commands of a section, one per line of its `sh` blocks; lines that end in a backslash are joined.

    Comments and empty lines are left out.
    """
    joined = "\n".join(_BLOCK.findall(section_of(guide, title))).replace("\\\n", " ")
    lines = (" ".join(line.split()) for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
