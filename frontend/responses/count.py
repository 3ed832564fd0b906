"""POST /v1/responses/input_tokens: how long the prompt of a response would be. No worker is asked."""

import asyncio

from kvmesh.frontend.callers import model_for, visiting
from kvmesh.frontend.endpoint import Endpoint, Services, identified, salted, timeout_s
from kvmesh.frontend.operation import ASKED_FAILURES, Operation
from kvmesh.frontend.prompts import read_prompts
from kvmesh.frontend.responses.parse import parse_responses
from kvmesh.frontend.responses.shapes import InputTokens, ResponsesRequest
from kvmesh.frontend.responses.state import KeptResponses
from kvmesh.mesh.http.request import Reply, Request, json_reply


async def count_input_tokens(services: Services, request: Request) -> Reply:
    """Count the tokens that the same body would have as the prompt of a response. Raise MeshError."""
    deadline = asyncio.get_running_loop().time() + timeout_s(request, services.limits)
    with services.admission.enter(), services.admission.until(deadline):
        kept = services.parts.find(KeptResponses)
        storage = None if kept is None else await kept.storage_for(request)
        parsed = salted(request, parse_responses(request.body, storage))
        async with visiting(request):
            [prompt] = await read_prompts(parsed, await model_for(request, services.models, parsed.model))
    return json_reply(InputTokens(prompt.num_tokens))


ENDPOINT = Endpoint(
    method="POST",
    path="/v1/responses/input_tokens",
    handler=identified(count_input_tokens, "count"),
    operation=Operation(
        summary="Count the tokens of a response's prompt",
        request=(ResponsesRequest,),
        reply=InputTokens,
        failures=ASKED_FAILURES,
        is_asked=True,
    ),
)
