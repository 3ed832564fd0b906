"""Answer on the request plane which keys this process shows. Static discovery is made of these answers."""

import asyncio
from typing import Annotated

from msgspec import Meta

from kvmesh.mesh.plane.server import Call
from kvmesh.protocol.errors import ConfigError, OverloadedError
from kvmesh.protocol.ids import new_generation
from kvmesh.protocol.messages import Message

METHOD = "discovery_keys"
REPEAT_S = 3.0  # between two messages of an answer, at most
MAX_ASKERS = 1024
MAX_KEYS = 1024  # of one process
MAX_KEY_CHARS = 512
MAX_VALUE_BYTES = 64 << 10

_Key = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_CHARS)]
_Value = Annotated[bytes, Meta(min_length=1, max_length=MAX_VALUE_BYTES)]


class KeysNews(Message, frozen=True):
    """A message of the method `discovery_keys`. The call stays open, and messages come when the keys change."""

    process: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]  # new on each start
    keys: Annotated[dict[_Key, _Value], Meta(max_length=MAX_KEYS)] | None = None  # all of them; None: as they were


class OwnKeys:
    """Holds the keys of this process, and reports them to each caller as long as the caller wants."""

    def __init__(self) -> None:
        self._process = new_generation()
        self._values: dict[str, bytes] = {}
        self._changed: set[asyncio.Event] = set()  # of each caller

    def put(self, key: str, value: bytes) -> None:
        """Raises ConfigError for more than those that ask would take."""
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_BYTES:
            found = f"{len(key)} characters with {len(value)} bytes"
            raise ConfigError(
                f"a key of {found} cannot be shown", hint=f"{MAX_KEY_CHARS} with {MAX_VALUE_BYTES} at most"
            )
        if key not in self._values and len(self._values) >= MAX_KEYS:
            raise ConfigError(f"{MAX_KEYS} keys of this process are shown already", hint="start another process")
        self._values[key] = value
        self._note_change()

    def withdraw(self, key: str) -> None:
        if self._values.pop(key, None) is not None:
            self._note_change()

    def values(self) -> dict[str, bytes]:
        return dict(self._values)

    async def answer(self, call: Call) -> None:
        """Report until the caller leaves. Raises OverloadedError if too many listen."""
        if len(self._changed) >= MAX_ASKERS:
            raise OverloadedError(f"{MAX_ASKERS} processes follow the keys of this one already")
        changed = asyncio.Event()
        changed.set()
        self._changed.add(changed)
        try:
            while True:
                has_changed = await _set_within(changed, REPEAT_S)
                changed.clear()
                await call.send(KeysNews(process=self._process, keys=self.values() if has_changed else None))
        finally:
            self._changed.discard(changed)

    def _note_change(self) -> None:
        for changed in self._changed:
            changed.set()


async def _set_within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
