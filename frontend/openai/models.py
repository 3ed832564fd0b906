"""GET /v1/models: the models and adapters that can be asked."""

from frontend.endpoint import Endpoint, Services, identified
from frontend.models import ServedModel
from frontend.openai.shapes import ModelList, ModelObject
from frontend.operation import Operation
from mesh.http.request import Reply, Request, json_reply


async def list_models(services: Services, request: Request) -> Reply:
    return json_reply(ModelList(data=[model_object(name, served) for name, served in services.models.names()]))


async def show_model(services: Services, request: Request) -> Reply:
    """Raise UnknownModelError, NoWorkerError."""
    name = request.params["name"]
    return json_reply(model_object(name, services.models.find_ready(name)))


def model_object(name: str, served: ServedModel) -> ModelObject:
    return ModelObject(
        id=name,
        created=served.created,
        parent=None if name == served.name else served.name,
        max_model_len=served.facts.context_tokens,
        block_size=served.facts.block_size,
    )


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/v1/models",
        handler=identified(list_models, "models"),
        operation=Operation(summary="What can be asked", reply=ModelList, failures=(401,)),
    ),
    Endpoint(
        method="GET",
        path="/v1/models/{name:path}",  # names may have slashes
        handler=identified(show_model, "models"),
        operation=Operation(summary="One model", reply=ModelObject, failures=(401, 404, 503)),
    ),
)
