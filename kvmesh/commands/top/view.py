"""Lay the mesh out for a terminal. Pure. Texts from the mesh are shown as text: no markup, no control characters."""

import re
import time
from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvmesh.frontend.live.fold import ShownMesh, ShownStream, ShownWorker

ROLE_STYLES = {"prefill": "yellow", "decode": "cyan", "aggregated": "magenta"}
KIND_STYLES = {"joined": "green", "returned": "green", "well": "green", "planner": "blue", "left": "dim"}
STATE_STYLES = {"ok": "green", "new": "green", "recovering": "yellow"}
BAR = 12
WIDE = 100  # columns of a terminal where bars and whole heads fit
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def screen(mesh: ShownMesh, wanted: str, width: int, height: int, problem: str = "") -> RenderableType:
    """Return all that is shown, in a terminal of `width` columns and `height` lines."""

    def matches(*texts: str) -> bool:
        return not wanted or any(wanted.lower() in text.lower() for text in texts)

    workers = [w for w in mesh.workers.values() if matches(w.name, w.role, w.model)]
    streams = [s for s in mesh.listed() if matches(s.id, s.model, s.prefill, s.decode, s.phase)]
    lines = max(16, height - 8)
    many = min(len(workers), max(4, lines // 2 - 3))
    parts: list[RenderableType] = [headline(mesh, problem), figures(mesh), worker_table(workers, many, width)]
    rest = max(6, lines - many - 6)
    parts.append(stream_table(streams, max(3, rest // 3)))
    if mesh.planner.name:
        parts.append(planner_lines(mesh))
    parts.append(Panel(decision_lines(mesh, max(2, rest // 4), matches), title="decisions", title_align="left"))
    parts.append(Panel(event_lines(mesh, max(3, rest // 4), matches), title="events", title_align="left"))
    return Group(*parts)


def plain(text: str) -> str:
    """Return a text without control characters, which a terminal would obey."""
    return _CONTROL.sub("�", text)


def headline(mesh: ShownMesh, problem: str) -> Text:
    name = plain(str(mesh.about.get("frontend", "")))
    line = Text.assemble(("kvmesh ", "bold blue"), ("top ", "bold"), (name, "dim"))
    if problem:
        line.append(f"   {plain(problem)}", "bold red")
    return line


def figures(mesh: ShownMesh) -> Text:
    totals = mesh.totals
    pulls = sum(count for _, _, count, _ in mesh.flows)
    parts = [
        ("workers", str(len(mesh.workers))),
        ("in flight", str(totals.inflight)),
        ("waiting", str(totals.waiting)),
        ("requests/s", f"{totals.requests_per_s:.1f}"),
        ("failures/s", f"{totals.failures_per_s:.1f}"),
        ("tokens/s", f"{totals.tokens_per_s:.0f}"),
        ("TTFT", milliseconds(totals.ttft_s)),
        ("ITL", milliseconds(totals.itl_s)),
        ("KV", share(totals.kv_share)),
        ("hits", share(totals.hit_share)),
        ("pulls", str(pulls)),
    ]
    line = Text()
    for name, value in parts:
        line.append(f"{name} ", "dim").append(f"{value}   ", "bold")
    return line


def worker_table(workers: Sequence[ShownWorker], most: int, width: int) -> Table:
    """Return the busiest workers: those that are not well first. Names and numbers are whole, the bar gives way."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, expand=False)
    for name in ("worker", "role", "health"):
        table.add_column(name, overflow="fold")
    has_room = width >= WIDE
    table.add_column("KV in use" if has_room else "KV", no_wrap=True, min_width=BAR + 6 if has_room else 4)
    for name in ("requests", "to prefill", "cached blocks") if has_room else ("requests", "queued", "cached"):
        table.add_column(name, justify="right", no_wrap=True, min_width=8)
    ordered = sorted(workers, key=lambda w: (is_well(w), -(w.look.requests if w.look else 0), w.role, w.name))
    for worker in ordered[:most]:
        look = worker.look
        state = look.state if look else "?"
        used = min(1.0, look.held_blocks / max(1, worker.blocks)) if look else 0.0
        role = ROLE_STYLES.get(worker.role, "")
        table.add_row(
            Text(plain(worker.name)[:40]),
            Text(plain(worker.role), role),
            Text("well" if state == "ok" else plain(state), STATE_STYLES.get(state, "bold red")),
            Text(bar(used), role) + Text(f" {used:4.0%}", "dim") if has_room else Text(f"{used:4.0%}", role),
            str(look.requests if look else 0),
            str(look.queued_tokens if look else 0),
            str(look.cached_blocks if look else 0),
        )
    if len(ordered) > most:
        table.add_row(Text(f"and {len(ordered) - most} more", "dim"))
    return table


def is_well(worker: ShownWorker) -> bool:
    return worker.look is None or worker.look.state in STATE_STYLES


def stream_table(streams: Sequence[ShownStream], most: int) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, expand=False)
    for name in ("request", "phase", "path"):
        table.add_column(name, overflow="fold")
    for name in ("prompt", "cached", "answer"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name) + 1)
    for stream in streams[:most]:
        path = f"{stream.prefill} → {stream.decode}" if stream.prefill else stream.decode or "the router's queue"
        phase = stream.outcome or stream.phase
        style = "dim" if stream.outcome == "ok" else "bold red" if stream.outcome else "cyan"
        sizes = [str(stream.isl), str(stream.cached), f"{stream.osl}/{stream.most}"]
        table.add_row(Text(plain(stream.id)[-16:], "dim"), Text(plain(phase), style), Text(plain(path)), *sizes)
    return table


def planner_lines(mesh: ShownMesh) -> RenderableType:
    planner, text = mesh.planner, Text()
    if planner.problem:
        text.append(plain(planner.problem), "bold red")
    if planner.steps:
        step = planner.steps[-1]
        for role, (ready, starting, _, ordered) in (("prefill", step.prefill), ("decode", step.decode)):
            text.append(f"{role} {ready}", ROLE_STYLES[role]).append(f"+{starting} of {ordered}   ", "dim")
        forecast = "?" if step.forecast is None else f"{step.forecast:.1f}"
        text.append(f"{'?' if step.rps is None else f'{step.rps:.1f}'} requests/s, forecast {forecast}\n")
        text.append(plain("; ".join(step.why)) or "as decided before", "dim")
    return Panel(text, title=f"planner {plain(planner.name)}", title_align="left")


def decision_lines(mesh: ShownMesh, most: int, matches: Callable[..., bool]) -> Text:
    found = [decision for decision in mesh.decisions if matches(decision.why)][-most:]
    lines = [Text.assemble((clock(d.at), "dim"), " ", plain(d.why)) for d in reversed(found)]
    return Text("\n").join(lines) if lines else Text("none yet", "dim")


def event_lines(mesh: ShownMesh, most: int, matches: Callable[..., bool]) -> Text:
    found = [event for event in mesh.events if matches(event.who, event.kind, event.text)][-most:]
    lines = [
        Text.assemble(
            (clock(event.at), "dim"), " ", (plain(event.kind), KIND_STYLES.get(event.kind, "bold red")), " ",
            (plain(event.who), "bold"), " ", plain(event.text),
        )
        for event in reversed(found)
    ]  # fmt: skip
    return Text("\n").join(lines) if lines else Text("nothing has happened yet", "dim")


def bar(part: float) -> str:
    full = round(part * BAR)
    return "█" * full + "░" * (BAR - full)


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{1000 * value:.0f} ms"


def clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s)) if 0 <= unix_s < 1e11 else "?"
