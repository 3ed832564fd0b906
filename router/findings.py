"""Say where workers were searched, what was found there and why it does not count. Pure.

The report is part of /health, which needs no key. So reasons have neither contents of cards that cannot be read, nor
addresses or paths of workers.
"""

import math
from collections.abc import Callable, Iterable
from itertools import chain, islice

from msgspec import Struct

from kvmesh.mesh.discovery.place import SearchPlace

KEY_PREFIX = "workers/"
OTHER_SERVICES = ("routers/", "frontends/", "limiters/", "planners/", "doctor/", "kept/")  # keys that are no worker's
MAX_IGNORED = 32  # keys that are remembered with a reason; further keys are only counted
MAX_TOLD = 8  # of them in the log
MAX_KEY_CHARS = 100
GRACE_S = 5.0  # without a worker, before the log says so
GAP_S = 10.0  # between two such lines
UNREADABLE = "its card cannot be read; the log says what is wrong"


class IgnoredKey(Struct, frozen=True):
    key: str
    reason: str


class AskedAddress(Struct, frozen=True):
    """An address that discovery asks for the keys of a service."""

    address: str
    said: str


class DiscoveryReport(Struct, frozen=True, omit_defaults=True):
    """The part of /health that tells of discovery."""

    place: str
    status: str
    workers_found: int
    ignored: list[IgnoredKey]
    asked: list[AskedAddress] = []
    down: list[IgnoredKey] = []  # workers without a card, because they end again and again


NOTHING_SEARCHED = DiscoveryReport("", SearchPlace("").status(), 0, [])


class Findings:
    """Remembers the keys of workers that discovery shows, and why some of them do not count."""

    def __init__(self) -> None:
        self._found: set[str] = set()  # as many as discovery itself holds
        self._ignored: dict[str, str] = {}

    def count(self, key: str) -> None:
        """Take a key whose worker can be used."""
        self._found.add(key)
        self._ignored.pop(key, None)

    def ignore(self, key: str, reason: str) -> None:
        """Take a key whose worker cannot be used."""
        self._found.add(key)
        if key in self._ignored or len(self._ignored) < MAX_IGNORED:
            self._ignored[key] = reason

    def forget(self, key: str) -> None:
        self._found.discard(key)
        self._ignored.pop(key, None)

    def report(self, place: SearchPlace, others: Iterable[tuple[str, str]] = ()) -> DiscoveryReport:
        """Return the report; `others` are further keys that do not count, with their reasons."""
        left_out = {key: why for key, why in place.ignored if not key.startswith(OTHER_SERVICES)}
        ignored = islice(chain(self._ignored.items(), others, left_out.items()), MAX_IGNORED)
        return DiscoveryReport(
            place=writable(place.name),
            status=place.status(),
            workers_found=len(self._found.union(key for key in left_out if key.startswith(KEY_PREFIX))),
            ignored=[IgnoredKey(writable(key[:MAX_KEY_CHARS]), reason) for key, reason in ignored],
            asked=[AskedAddress(address, writable(said)) for address, said in islice(place.asked, MAX_IGNORED)],
        )


def writable(text: str) -> str:
    """Return a text that JSON can hold: a file's name may have bytes that are no UTF-8."""
    return text.encode(errors="replace").decode()


def sentence(report: DiscoveryReport) -> str:
    """Return the report as one line of the log."""
    head = f"no worker can be used: searched in {report.place} ({report.status}), found {report.workers_found}"
    reasons = [*report.down, *report.ignored]
    if report.asked:
        told = [f"{one.address}: {one.said}" for one in report.asked[:MAX_TOLD]]
        head += f"; asked {', '.join(told)}" + (" ..." if len(report.asked) > MAX_TOLD else "")
    if not report.workers_found and not reasons:
        return f"{head}; give workers the same --discovery"
    told = [f"{found.key}: {found.reason}" for found in reasons[:MAX_TOLD]]
    if (more := len(reasons) - len(told)) > 0:
        told.append(f"and {more} more, see /health")
    return "; ".join([head, *told])


class Complaint:
    """Decides when the log says that there is no worker: after GRACE_S without one, and when the finding changes."""

    def __init__(self) -> None:
        self._missing_since_s: float | None = None
        self._told = ""
        self._told_s = -math.inf

    def on_time(self, now_s: float, is_served: bool, report: Callable[[], DiscoveryReport]) -> str:
        """Return the line to log, "" for none."""
        if is_served:
            self._missing_since_s, self._told = None, ""
            return ""
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        if now_s - self._missing_since_s < GRACE_S or now_s - self._told_s < GAP_S:
            return ""
        text = sentence(report())
        if text == self._told:
            return ""
        self._told, self._told_s = text, now_s
        return text
