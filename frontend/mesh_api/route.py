"""POST /kvmesh/route: where a chat or a text completion would run, and why."""

import asyncio

from kvmesh.frontend.callers import model_for, visiting
from kvmesh.frontend.endpoint import Endpoint, Services, identified, new_id, timeout_s, with_hints
from kvmesh.frontend.job import prepare
from kvmesh.frontend.openai.parameters import parse_either
from kvmesh.frontend.openai.shapes import ChatRequest, CompletionRequest
from kvmesh.frontend.operation import ASKED_FAILURES, Operation
from kvmesh.mesh.http.request import Reply, Request, json_reply
from kvmesh.mesh.http.server import client_request_id
from kvmesh.protocol.messages import RouteRequest
from kvmesh.router.api import PlaceReply, place_reply


async def preview(services: Services, request: Request) -> Reply:
    """Report where a request would run; nothing is run or booked. Raise MeshError."""
    deadline = asyncio.get_running_loop().time() + timeout_s(request, services.limits)
    with services.admission.enter(), services.admission.until(deadline):
        async with visiting(request):
            parsed = with_hints(request, parse_either(request.body), is_steered=services.is_steered)
            model = await model_for(request, services.models, parsed.model)
            job = await prepare(parsed, model, new_id("route", client_request_id(request)), deadline)
            asked = job.branches[0].request
            placed = await services.generator.preview(asked, parsed.hints, deadline)
    route = RouteRequest(
        request_id=asked.request_id, model=model.name, isl_tokens=job.prompts[0].num_tokens, lora=model.lora
    )
    return json_reply(place_reply(route, placed, model.block_size, None))


ENDPOINT = Endpoint(
    method="POST",
    path="/kvmesh/route",
    handler=identified(preview, "route"),
    operation=Operation(
        summary="Where a chat or a text would run, and why; it is not run",
        request=(ChatRequest, CompletionRequest),
        reply=PlaceReply,
        failures=ASKED_FAILURES,
        is_asked=True,
        takes_hints=True,
    ),
)
