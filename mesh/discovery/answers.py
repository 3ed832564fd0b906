"""Decide which keys count under static discovery. Pure: answers of addresses and the time go in, keys come out.

A key counts while one of the addresses that are asked shows it. An address that falls silent keeps its keys for a
lease; then they lapse. They lapse at once where nothing listens any more.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kvmesh.mesh.discovery.view import KeyView
from kvmesh.protocol.errors import ConfigError, WireError

LEASE_S = 10.0  # of the keys of an address that says nothing
FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 5.0  # between two questions to an address that cannot be reached
FOREIGN_RETRY_S, LONGEST_FOREIGN_RETRY_S = 2.0, 30.0  # ... at which something else listens
MAX_ADDRESSES = 4096
MAX_LIST_BYTES = 1 << 20
MAX_SAID_CHARS = 200
NOT_ASKED = "not asked yet"
_ADDRESS = re.compile(r"(\[[0-9A-Za-z:.%_-]+\]|[0-9A-Za-z._-]+):([0-9]{1,5})")


def read_addresses(data: bytes, name: str) -> list[str]:
    """Read a list of addresses, one in a line; what follows a # is a comment. Raises ConfigError with the line."""
    if len(data) > MAX_LIST_BYTES:
        raise ConfigError(f"{name} has {len(data)} bytes", hint=f"a list of addresses has at most {MAX_LIST_BYTES}")
    addresses: dict[str, None] = {}
    for number, line in enumerate(data.decode(errors="replace").splitlines(), start=1):
        if address := line.partition("#")[0].strip():
            if not is_address(address):
                raise ConfigError(
                    f"{name}, line {number}: {address[:MAX_SAID_CHARS]!r} is no address",
                    hint="write host:port of a request plane in each line, [host]:port for IPv6",
                )
            addresses[address] = None
    if not addresses:
        raise ConfigError(f"{name} lists no address", hint="write host:port of a service in each line")
    if len(addresses) > MAX_ADDRESSES:
        raise ConfigError(f"{name} lists {len(addresses)} addresses", hint=f"{MAX_ADDRESSES} at most")
    return list(addresses)


def is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[2]) < 65536


@dataclass(slots=True)
class _Answer:
    """The latest news of one address."""

    process: int = 0
    keys: dict[str, bytes] = field(default_factory=dict)
    heard_s: float | None = None
    silent_since_s: float | None = None  # None: its call is open, or it has not been asked
    said: str = NOT_ASKED


class Answers:
    """Track what each address has answered. Times are seconds of one monotonic clock."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._view = KeyView(lease_s)
        self._of: dict[str, _Answer] = {}
        self._own: set[str] = set()

    def on_addresses(self, addresses: Iterable[str]) -> None:
        """Take the addresses that are asked from now on. The keys of others are withdrawn."""
        listed = list(addresses)
        for address in self._of.keys() - set(listed):
            gone = self._of.pop(address)
            self._withdraw(gone.keys)
        self._of = {address: self._of.get(address) or _Answer() for address in listed}

    def on_news(self, address: str, process: int, keys: Mapping[str, bytes] | None, now_s: float) -> None:
        """Take a message of an address; None: its keys are as they were. Raises WireError if none were known."""
        answer = self._of[address]
        if keys is None and process != answer.process:
            raise WireError(f"{address} does not say which keys it shows")
        answer.heard_s, answer.silent_since_s = now_s, None
        if keys is None:
            return
        before, answer.process, answer.keys = answer.keys, process, dict(keys)
        answer.said = f"answers and shows {len(keys)} keys" if len(keys) != 1 else "answers and shows 1 key"
        self._withdraw(before)
        for key, value in keys.items():
            self._view.on_put(key, value)

    def on_silence(self, address: str, why: str, now_s: float, *, is_gone: bool = False) -> None:
        """Take that an address does not answer. `is_gone`: no process listens there."""
        answer = self._of[address]
        answer.said = why[:MAX_SAID_CHARS]
        if answer.silent_since_s is None:
            answer.silent_since_s = now_s if answer.heard_s is None else answer.heard_s
        if is_gone:
            self._lapse(answer)
        self.on_time(now_s)

    def on_own(self, key: str, value: bytes) -> None:
        """Take a key of this process; an empty value withdraws it."""
        if value:
            self._own.add(key)
        else:
            self._own.discard(key)
        self._view.on_put(key, value)

    def on_time(self, now_s: float) -> None:
        """Let the keys of addresses lapse that have been silent for a lease."""
        for answer in self._of.values():
            if answer.silent_since_s is not None and now_s - answer.silent_since_s >= self._lease_s:
                self._lapse(answer)

    def retry_s(self, address: str, now_s: float, *, is_foreign: bool = False) -> float:
        """Return when to ask a silent address again. One that has just gone may be starting again."""
        since_s = self._of[address].silent_since_s
        silent_s = 0.0 if since_s is None else now_s - since_s
        if is_foreign:
            return min(max(FOREIGN_RETRY_S, silent_s / 2), LONGEST_FOREIGN_RETRY_S)
        return min(max(FIRST_RETRY_S, silent_s / 10), LONGEST_RETRY_S)

    def has_answered(self, address: str) -> bool:
        return self._of[address].heard_s is not None

    def said(self) -> tuple[tuple[str, str], ...]:
        """Return what each address has said, those that do not answer first."""
        ordered = sorted(self._of.items(), key=lambda item: item[1].silent_since_s is None)
        return tuple((address, answer.said) for address, answer in ordered)

    @property
    def num_answering(self) -> int:
        return sum(answer.heard_s is not None and answer.silent_since_s is None for answer in self._of.values())

    @property
    def is_all_silent(self) -> bool:
        return bool(self._of) and all(answer.silent_since_s is not None for answer in self._of.values())

    def present(self) -> dict[str, bytes]:
        return self._view.present()

    def lapsed(self) -> frozenset[str]:
        return self._view.lapsed()

    def _withdraw(self, keys: Collection[str]) -> None:
        for key in self._no_longer_shown(keys):
            self._view.on_put(key, b"")

    def _lapse(self, answer: _Answer) -> None:
        keys, answer.keys, answer.process = answer.keys, {}, 0
        for key in self._no_longer_shown(keys):
            self._view.on_lapse(key)

    def _no_longer_shown(self, keys: Collection[str]) -> list[str]:
        shown = (self._own, *(answer.keys for answer in self._of.values()))
        return [key for key in keys if not any(key in some for some in shown)]
