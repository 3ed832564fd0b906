"""POST /v1/messages/count_tokens: how long a prompt would be. No worker is asked."""

import asyncio

from kvmesh.frontend.anthropic.errors import error_body
from kvmesh.frontend.anthropic.parse import PROMPT_DEFAULTS, parse_count
from kvmesh.frontend.anthropic.shapes import CountRequest, ErrorAnswer, TokenCount
from kvmesh.frontend.callers import model_for, visiting
from kvmesh.frontend.endpoint import Endpoint, Services, identified, salted, timeout_s
from kvmesh.frontend.operation import ASKED_FAILURES, Operation, ShapeNotes
from kvmesh.frontend.prompts import chat_prompt
from kvmesh.mesh.http.request import Reply, Request, json_reply


async def count_tokens(services: Services, request: Request) -> Reply:
    """Count; a prompt that is sure not to fit is refused, because counting it could take seconds. Raise MeshError."""
    deadline = asyncio.get_running_loop().time() + timeout_s(request, services.limits)
    with services.admission.enter(), services.admission.until(deadline):
        parsed = salted(request, parse_count(request.body))
        async with visiting(request):
            prompt = await chat_prompt(parsed, await model_for(request, services.models, parsed.model))
    return json_reply(TokenCount(prompt.num_tokens))


ENDPOINT = Endpoint(
    method="POST",
    path="/v1/messages/count_tokens",
    handler=identified(count_tokens, "count", error_body),
    error_body=error_body,
    operation=Operation(
        summary="Count the tokens of a prompt",
        request=(CountRequest,),
        reply=TokenCount,
        error=ErrorAnswer,
        failures=ASKED_FAILURES,
        is_asked=True,
        notes=ShapeNotes(
            partly=((CountRequest, PROMPT_DEFAULTS),),
            examples={(CountRequest, "messages"): [{"role": "user", "content": "Tell me a story."}]},
        ),
    ),
)
