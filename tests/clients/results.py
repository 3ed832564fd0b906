"""Read what the scripts of clients print, and make the table of docs/api.md of it. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.clients.catalogue import CLIENTS, FLOWS

BEGIN = "<!-- clients: written by `make test-clients ARGS=--write-table` -->"
END = "<!-- clients: end -->"
_TITLES = {"second_turn": "second turn"}
_CELLS = {"ok": "yes", "failed": "**no**", "lacks": "–"}


@dataclass(frozen=True, slots=True)
class FlowResult:
    """The `outcome` of one flow is "ok", "failed" or "lacks"; `detail` gives the reason for the last two."""

    outcome: str
    detail: str = ""
    took_s: float = 0.0


@dataclass(slots=True)
class ClientResult:
    """Collect what the script of one client has reported. `attempts`: other hosts that it tried to reach."""

    version: str = ""
    flows: dict[str, FlowResult] = field(default_factory=dict)
    trouble: str = ""  # how the script ended, and the end of its stderr, if not well
    attempts: tuple[str, ...] = ()

    def flow(self, name: str) -> FlowResult:
        return self.flows.get(name) or FlowResult("failed", f"the script said nothing of {name!r}; {self.trouble}")


def read_lines(lines: Iterable[str]) -> ClientResult:
    """Read the JSON objects that a script printed. Other lines are what its libraries print, and are passed over."""
    result = ClientResult()
    for line in lines:
        said = _object(line)
        if "flow" in said:
            result.flows[said["flow"]] = _flow(said)
        elif "version" in said:
            result.version = said["version"]
    return result


def _object(line: str) -> dict[str, object]:
    try:
        said = json.loads(line) if line.startswith("{") else {}
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _flow(said: Mapping[str, object]) -> FlowResult:
    if reason := said.get("lacks"):
        return FlowResult("lacks", str(reason))
    return FlowResult(
        "ok" if said.get("ok") is True else "failed", str(said.get("detail", "")), float(said.get("s", 0))
    )  # type: ignore[arg-type]


def table(results: Mapping[str, ClientResult], before: str = "") -> str:
    """Return the Markdown of client x flow, and below it the reasons why clients lack flows.

    A client without a result keeps its lines of the table `before`.
    """
    kept = before.splitlines()
    titles = [_TITLES.get(flow, flow) for flow in FLOWS]
    rows = [_line(["client", "version", *titles, "also"]), _line(["---"] * (len(FLOWS) + 3))]
    reasons = []
    for client in CLIENTS:
        result = results.get(client.name)
        marks = (f"| {client.name} | ", f"- {client.name} has no ")
        old = [[line for line in kept if line.startswith(mark)] for mark in marks]
        rows += old[0] if result is None else [_row(client.name, result)]
        reasons += old[1] if result is None else _reasons(client.name, result)
    return "\n".join([*rows, *([""] if reasons else []), *reasons, ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _row(name: str, result: ClientResult) -> str:
    more = [flow for flow in result.flows if flow not in FLOWS]
    also = ", ".join(f"{_TITLES.get(flow, flow)}{_mark(result.flows[flow])}" for flow in more)
    return _line([name, result.version, *(_CELLS[result.flow(flow).outcome] for flow in FLOWS), also])


def _mark(result: FlowResult) -> str:
    return "" if result.outcome == "ok" else f": {_CELLS[result.outcome]}"


def _reasons(name: str, result: ClientResult) -> list[str]:
    """Return a line for each reason, with the flows that the client lacks for it."""
    by_reason: dict[str, list[str]] = {}
    for flow, said in result.flows.items():
        if said.outcome == "lacks":
            by_reason.setdefault(said.detail, []).append(_TITLES.get(flow, flow))
    return [f"- {name} has no {_and(flows)}: {reason}." for reason, flows in by_reason.items()]


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def section_of(page: str) -> str:
    """Return what stands between the two markers of a page."""
    return page.split(f"{BEGIN}\n", 1)[1].split(END, 1)[0]


def with_section(page: str, section: str) -> str:
    """Return the page with `section` between its markers."""
    before, rest = page.split(f"{BEGIN}\n", 1)
    return f"{before}{BEGIN}\n{section}{END}{rest.split(END, 1)[1]}"
