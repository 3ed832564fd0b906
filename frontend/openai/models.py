"""GET /v1/models: the models and adapters that can be asked, in the shape that the client knows."""

from collections.abc import Callable, Sequence

from kvmesh.frontend.callers import models_for, ready_model_for
from kvmesh.frontend.endpoint import Endpoint, Handler, Services, identified
from kvmesh.frontend.extension import ModelsShape
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


def by_client(own: Handler, others: Sequence[tuple[Callable[[Request], bool], Handler]]) -> Handler:
    """Return the handler that answers clients of other APIs in their own shape, their failures included."""
    if not others:
        return own

    async def answer(services: Services, request: Request) -> Reply | ReplyStream:
        for is_client, handler in others:
            if is_client(request):
                return await handler(services, request)
        return await own(services, request)

    return answer


def endpoints(shapes: Sequence[ModelsShape]) -> Sequence[Endpoint]:
    """Return the endpoints of models. `shapes`: those of other APIs, whose clients use the same paths."""

    def handler(own: Handler, others: Sequence[Handler]) -> Handler:
        theirs = [
            (shape.is_client, identified(other, "models", shape.error_body))
            for shape, other in zip(shapes, others, strict=True)
        ]
        return by_client(identified(own, "models"), theirs)

    return (
        Endpoint(
            method="GET",
            path="/v1/models",
            handler=handler(list_models, [shape.list_models for shape in shapes]),
            operation=Operation(
                summary="; ".join(["What can be asked", *(shape.note for shape in shapes)]),
                reply=ModelList,
                others=[(shape.page, shape.error) for shape in shapes],
                query={name: (text, TEXT) for shape in shapes for name, text in shape.query.items()},
                failures=(400, 401),
            ),
        ),
        Endpoint(
            method="GET",
            path="/v1/models/{name:path}",  # names may have slashes
            handler=handler(show_model, [shape.show_model for shape in shapes]),
            operation=Operation(
                summary="One model",
                reply=ModelObject,
                others=[(shape.model, shape.error) for shape in shapes],
                failures=(401, 403, 404, 503),
            ),
        ),
    )
