"""Callers of the API: who has sent a request, which model it may use, and its place within the caller's limits.

Where the API is open there are none. A guard recognises them: it puts a caller into each request that it lets in.
"""

import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol, cast

from kvmesh.frontend.errors import ModelNotAllowedError, UnknownModelError
from kvmesh.frontend.models import Model, ModelRegistry, ServedModel
from kvmesh.frontend.salts import open_salt
from kvmesh.mesh.http.errors import ForbiddenError, UnauthorizedError
from kvmesh.mesh.http.request import Request

_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)
_CARRIERS = ("authorization", "x-api-key")
SEND = "send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`"


class Visit(Protocol):
    """One request of a caller with limits, from its beginning to its end."""

    async def reserve(self, prompt_tokens: int, max_tokens: int | None, answers: int = 1) -> None:
        """Take the tokens of a request; `max_tokens` are those of all its answers, None if it names no limit.

        Raise MeshError. Then the request does not count.
        """
        ...

    def end(self, used_tokens: int, answers_tokens: Iterable[int] = ()) -> None:
        """Count what was used; `answers_tokens` are the lengths of the answers. A second call does nothing."""
        ...


class CallerLimits(Protocol):
    """The limits of one caller."""

    async def begin(self) -> Visit:
        """Let a request in. Raise MeshError."""
        ...


class CallerUsage(Protocol):
    """Counts what one caller uses."""

    name: str  # of the caller, for logs

    def count(self, outcome: str) -> None:
        """Count one request that has ended."""
        ...

    def add(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count tokens."""
        ...


class ApiCaller(Protocol):
    """Whoever a key or a token stands for, with what it allows. Also a kvmesh.mesh.http.request.Caller."""

    @property
    def usage(self) -> CallerUsage: ...

    @property
    def meter(self) -> CallerLimits | None:
        """Return what holds the caller to its limits, None if it has none."""
        ...

    @property
    def tenant(self) -> str: ...

    @property
    def owner(self) -> str:
        """Return the caller's name where its tokens change, "" where its key stands for it."""
        ...

    @property
    def is_admin(self) -> bool: ...

    @property
    def is_choosy(self) -> bool:
        """Return whether there may be models that the caller may not use."""
        ...

    def may_use(self, model: str) -> bool: ...

    def salt(self, asked: str | None) -> str | None:
        """Return the salt of a prompt that asks for the salt `asked`."""
        ...

    def priority(self, asked: int) -> int:
        """Return the priority that a request gets."""
        ...

    def reply_headers(self) -> Mapping[str, str]: ...


def recognise(request: Request, caller: ApiCaller) -> None:
    """Put the caller into a request, for a guard that lets it in."""
    request.caller = caller


def caller_of(request: Request) -> ApiCaller | None:
    """Return the caller of a request; None if the API is open to everybody."""
    return cast("ApiCaller | None", request.caller)


def sent_key(request: Request) -> str | None:
    """The key that a request carries: OpenAI's clients send a bearer token, Anthropic's a header of its own.

    Raises UnauthorizedError for one of these headers that was sent twice: what is in front of us may have looked at
    the other.
    """
    names = [name for name, _ in request.headers if name in _CARRIERS]
    if len(set(names)) < len(names):
        raise UnauthorizedError("a header with an API key was sent twice", hint="send one key; " + SEND)
    if found := _BEARER.fullmatch(request.header("authorization") or ""):
        return found[1]
    return request.header("x-api-key") or None


def check_admin(request: Request) -> None:
    """Raise ForbiddenError unless the request has an admin key. An API without keys has no admins."""
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


async def begin(request: Request) -> Visit | None:
    """Let a request in that asks a model for something. None: its caller has no limits. Raise RateLimitedError."""
    caller = caller_of(request)
    return None if caller is None or caller.meter is None else await caller.meter.begin()


@asynccontextmanager
async def visiting(request: Request) -> AsyncIterator[None]:
    """Count a request that no worker is asked for, while the block runs. Raise RateLimitedError."""
    visit = await begin(request)
    try:
        yield
    finally:
        if visit is not None:
            visit.end(0)


async def model_for(request: Request, models: ModelRegistry, name: str) -> Model:
    """Return the model that a request asks for. Raise what ModelRegistry.get raises, and ModelNotAllowedError."""
    check_model(request, name)
    try:
        return await models.get(name)
    except UnknownModelError as error:
        raise _without_others(request, error) from None


def ready_model_for(request: Request, models: ModelRegistry, name: str) -> ServedModel:
    """Return what is known of a model that can be asked. Raise what ModelRegistry.find_ready raises, and
    ModelNotAllowedError."""
    check_model(request, name)
    try:
        return models.find_ready(name)
    except UnknownModelError as error:
        raise _without_others(request, error) from None


def models_for(request: Request, models: ModelRegistry) -> Iterator[tuple[str, ServedModel]]:
    """Yield what the caller of a request may ask for, as ModelRegistry.names does."""
    caller = caller_of(request)
    for name, served in models.names():
        if caller is None or caller.may_use(name):
            yield name, served


def _without_others(request: Request, error: UnknownModelError) -> UnknownModelError:
    """Return the error without the names of models that the caller may not use."""
    caller = caller_of(request)
    if caller is None or not caller.is_choosy:
        return error
    return UnknownModelError(error.message, hint="GET /v1/models lists those that you may use", param=error.param)
