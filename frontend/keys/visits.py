"""Requests of callers: the model that each may use, and its place within the limits of its key."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from kvmesh.frontend.errors import UnknownModelError
from kvmesh.frontend.keys.caller import caller_of, check_model
from kvmesh.frontend.keys.meter import Visit
from kvmesh.frontend.models import Model, ModelRegistry, ServedModel
from kvmesh.mesh.http.request import Request


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
