"""GET /v1/models: the models and adapters that can be asked, in the shape that the client knows."""

from kvmesh.frontend.anthropic import models as anthropics
from kvmesh.frontend.anthropic.errors import error_body
from kvmesh.frontend.anthropic.shapes import ErrorAnswer, ModelInfo, ModelPage
from kvmesh.frontend.endpoint import Endpoint, Handler, Services, identified
from kvmesh.frontend.keys.visits import models_for, ready_model_for
from kvmesh.frontend.models import ServedModel
from kvmesh.frontend.openai.shapes import ModelList, ModelObject
from kvmesh.frontend.operation import Operation
from kvmesh.mesh.http.request import Reply, ReplyStream, Request, json_reply

TEXT = {"type": "string"}  # and so is the limit, which OpenAI's shape does not read


async def list_models(services: Services, request: Request) -> Reply:
    return json_reply(
        ModelList(data=[model_object(name, served) for name, served in models_for(request, services.models)])
    )


async def show_model(services: Services, request: Request) -> Reply:
    """Raise UnknownModelError, NoWorkerError."""
    name = request.params["name"]
    return json_reply(model_object(name, ready_model_for(request, services.models, name)))


def model_object(name: str, served: ServedModel) -> ModelObject:
    return ModelObject(
        id=name,
        created=served.created,
        parent=None if name == served.name else served.name,
        max_model_len=served.facts.context_tokens,
        block_size=served.facts.block_size,
    )


def by_client(own: Handler, for_anthropics: Handler) -> Handler:
    """Return the handler that answers clients of Anthropic's in their own shape, its failures included."""
    ours, theirs = identified(own, "models"), identified(for_anthropics, "models", error_body)

    async def answer(services: Services, request: Request) -> Reply | ReplyStream:
        return await (theirs if anthropics.is_anthropics(request) else ours)(services, request)

    return answer


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/v1/models",
        handler=by_client(list_models, anthropics.list_models),
        operation=Operation(
            summary="What can be asked; in Anthropic's shape with the header anthropic-version or x-api-key",
            reply=ModelList,
            other=(ModelPage, ErrorAnswer),
            query={
                "limit": ("in Anthropic's shape: models in a page, 1 to 1000, without it 20", TEXT),
                "after_id": ("in Anthropic's shape: return the page after this model", TEXT),
                "before_id": ("in Anthropic's shape: return the page before this model", TEXT),
            },
            failures=(400, 401),
        ),
    ),
    Endpoint(
        method="GET",
        path="/v1/models/{name:path}",  # names may have slashes
        handler=by_client(show_model, anthropics.show_model),
        operation=Operation(
            summary="One model", reply=ModelObject, other=(ModelInfo, ErrorAnswer), failures=(401, 403, 404, 503)
        ),
    ),
)
