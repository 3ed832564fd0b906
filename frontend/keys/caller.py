"""A caller: whoever a key stands for, with what the key allows."""

import re
from collections.abc import Mapping
from functools import lru_cache

from kvmesh.frontend.keys.errors import ModelNotAllowedError
from kvmesh.frontend.keys.meter import Meter
from kvmesh.frontend.keys.salts import open_salt, own_salt
from kvmesh.frontend.keys.usage import Usage
from kvmesh.mesh.http.errors import ForbiddenError
from kvmesh.mesh.http.request import Request

_NO_HEADERS: Mapping[str, str] = {}


class KeyCaller:
    """The holder of one key. Implements kvmesh.mesh.http.request.Caller."""

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
        frontend/keys/salts.py."""
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


def caller_of(request: Request) -> KeyCaller | None:
    """Return the caller of a request; None if the API is open to everybody."""
    caller = request.caller
    return caller if isinstance(caller, KeyCaller) else None


def check_admin(request: Request) -> None:
    """Raise ForbiddenError unless the key of a request may control the mesh. Where there are no keys, nobody may."""
    caller = caller_of(request)
    if caller is None:
        raise ForbiddenError(
            "this API has no keys, so nobody may control its mesh",
            hint="start the frontend with --api-keys-file, and make a key with `kvmesh keys new --admin`",
        )
    if not caller.is_admin:
        raise ForbiddenError("this API key may not control the mesh", hint="make one with `kvmesh keys new --admin`")


def check_whole_mesh(request: Request) -> None:
    """Raise ForbiddenError for a key of one tenant, or of some models: the requests of all are shown."""
    caller = caller_of(request)
    if caller is not None and (caller.tenant or caller.is_choosy):
        raise ForbiddenError(
            "this API key is limited to a tenant or to some models, and this shows the whole mesh",
            hint="use a key without a tenant and without --models",
        )


def check_model(request: Request, model: str) -> None:
    """Raise ModelNotAllowedError."""
    caller = caller_of(request)
    if caller is not None and not caller.may_use(model):
        raise ModelNotAllowedError(model)


def salt_for(request: Request, asked: str | None) -> str | None:
    """Return the salt of a request's prompt: that of its caller, or what it asks for where the API is open."""
    caller = caller_of(request)
    return open_salt(asked) if caller is None else caller.salt(asked)


@lru_cache(maxsize=1024)  # many keys have the same ones
def _matcher(patterns: tuple[str, ...]) -> re.Pattern[str] | None:
    either = "|".join(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".") for pattern in patterns)
    return re.compile(either, re.DOTALL) if either else None
