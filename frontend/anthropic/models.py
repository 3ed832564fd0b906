"""The models that can be asked, as Anthropic's Models API shows them: newest first, in pages."""

from collections.abc import Sequence
from datetime import UTC, datetime

from kvmesh.frontend.anthropic.errors import error_body
from kvmesh.frontend.anthropic.shapes import ErrorAnswer, ModelInfo, ModelPage
from kvmesh.frontend.bodies import refuse
from kvmesh.frontend.callers import models_for, ready_model_for
from kvmesh.frontend.endpoint import Services
from kvmesh.frontend.extension import ModelsShape
from kvmesh.frontend.models import ServedModel
from kvmesh.mesh.http.request import Reply, Request, json_reply

ANTHROPICS_HEADERS = ("anthropic-version", "x-api-key")  # clients of OpenAI's send neither
PAGE_MODELS = 20
MAX_PAGE_MODELS = 1000


def is_anthropics(request: Request) -> bool:
    """Return whether a client of Anthropic's has sent the request."""
    return any(request.header(name) is not None for name in ANTHROPICS_HEADERS)


async def list_models(services: Services, request: Request) -> Reply:
    """Raise InvalidRequestError."""
    query = request.query
    models = [model_info(name, served) for name, served in models_for(request, services.models)]
    models.sort(key=lambda model: model.created_at, reverse=True)
    limit = page_limit(query.get("limit", str(PAGE_MODELS)))
    return json_reply(page_of(models, limit, after=query.get("after_id"), before=query.get("before_id")))


async def show_model(services: Services, request: Request) -> Reply:
    """Raise UnknownModelError, NoWorkerError."""
    name = request.params["name"]
    return json_reply(model_info(name, ready_model_for(request, services.models, name)))


def model_info(name: str, served: ServedModel) -> ModelInfo:
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(served.created, UTC),
        max_input_tokens=served.facts.context_tokens,
        max_tokens=served.facts.context_tokens,
    )


def page_limit(text: str) -> int:
    """Raise InvalidRequestError."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_PAGE_MODELS))):
        refuse("limit", f"send a number from 1 to {MAX_PAGE_MODELS}")
    limit = int(text)
    if not 1 <= limit <= MAX_PAGE_MODELS:
        refuse("limit", f"send a number from 1 to {MAX_PAGE_MODELS}")
    return limit


def page_of(models: Sequence[ModelInfo], limit: int, *, after: str | None, before: str | None) -> ModelPage:
    """Return the models right after the one called `after`, right before the one called `before`, or the first ones.

    Raise InvalidRequestError if there is no such model.
    """
    if after is not None and before is not None:
        refuse("before_id", "after_id is given as well; send one of them")
    if before is not None:
        end = _position(models, before, "before_id")
        start = max(0, end - limit)
        page, has_more = models[start:end], start > 0
    else:
        start = 0 if after is None else _position(models, after, "after_id") + 1
        page, has_more = models[start : start + limit], start + limit < len(models)
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return ModelPage(data=page, has_more=has_more, first_id=first, last_id=last)


def _position(models: Sequence[ModelInfo], name: str, param: str) -> int:
    names = [model.id for model in models]
    if name not in names:
        refuse(param, "there is no model of this name; begin again without it")
    return names.index(name)


MODELS = ModelsShape(
    is_client=is_anthropics,
    list_models=list_models,
    show_model=show_model,
    page=ModelPage,
    model=ModelInfo,
    error=ErrorAnswer,
    error_body=error_body,
    note="in Anthropic's shape with the header anthropic-version or x-api-key",
    query={
        "limit": "in Anthropic's shape: models in a page, 1 to 1000, without it 20",
        "after_id": "in Anthropic's shape: return the page after this model",
        "before_id": "in Anthropic's shape: return the page before this model",
    },
)
