"""A caller: whoever a key stands for, with what the key allows."""

import re
from collections.abc import Mapping
from functools import lru_cache

from kvmesh.frontend.keys.meter import Meter
from kvmesh.frontend.keys.usage import Usage
from kvmesh.frontend.salts import own_salt

_NO_HEADERS: Mapping[str, str] = {}


class KeyCaller:
    """The holder of one key. Implements kvmesh.frontend.callers.ApiCaller."""

    __slots__ = ("_models", "_secret", "is_admin", "max_priority", "meter", "owner", "tenant", "usage")

    def __init__(
        self,
        usage: Usage,
        *,
        tenant: str = "",
        models: tuple[str, ...] = (),
        max_priority: int | None = None,
        meter: Meter | None = None,
        owner: str = "",
        secret: bytes = b"",
        is_admin: bool = False,
    ) -> None:
        """`models`: patterns, none for all. `owner`: names the caller where tokens change, "" for a key. `secret`: see
        frontend/salts.py."""
        self._secret = secret
        self.is_admin = is_admin
        self.usage = usage
        self.tenant = tenant
        self.max_priority = max_priority
        self.meter = meter  # None: it has no limits
        self.owner = owner
        self._models = _matcher(models)

    def may_use(self, model: str) -> bool:
        return self._models is None or self._models.fullmatch(model) is not None

    @property
    def is_choosy(self) -> bool:
        """Return whether there may be models that the key may not use."""
        return self._models is not None

    def salt(self, asked: str | None) -> str | None:
        """Return the salt of a prompt that asks for the salt `asked`."""
        return own_salt(self.tenant, asked, self._secret)

    def priority(self, asked: int) -> int:
        """Return the priority that a request gets: no more than the key's ceiling."""
        return asked if self.max_priority is None else min(asked, self.max_priority)

    def reply_headers(self) -> Mapping[str, str]:
        return _NO_HEADERS if self.meter is None else self.meter.headers()


@lru_cache(maxsize=1024)  # many keys have the same ones
def _matcher(patterns: tuple[str, ...]) -> re.Pattern[str] | None:
    either = "|".join(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".") for pattern in patterns)
    return re.compile(either, re.DOTALL) if either else None
