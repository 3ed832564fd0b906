"""All endpoints of the frontend. The HTTP application, /openapi.json and the test of docs/api.md read this table."""

from collections.abc import Mapping, Sequence

from kvmesh.frontend.anthropic import count, messages
from kvmesh.frontend.anthropic.errors import error_body as anthropic_error
from kvmesh.frontend.endpoint import Endpoint, ErrorShape
from kvmesh.frontend.mesh_api import controls, route, status, tokenize, whatif
from kvmesh.frontend.openai import chat, completions, embeddings, models
from kvmesh.frontend.responses import count as input_tokens
from kvmesh.frontend.responses import create as responses
from kvmesh.frontend.responses import stored

ENDPOINTS: Sequence[Endpoint] = (
    chat.ENDPOINT,
    completions.ENDPOINT,
    responses.ENDPOINT,
    input_tokens.ENDPOINT,
    *stored.ENDPOINTS,
    messages.ENDPOINT,
    count.ENDPOINT,
    embeddings.ENDPOINT,
    *tokenize.ENDPOINTS,
    route.ENDPOINT,
    *controls.ENDPOINTS,
    whatif.ENDPOINT,
    *models.ENDPOINTS,
    *status.ENDPOINTS,
)

ERRORS_BELOW: Mapping[str, ErrorShape] = {"/v1/messages": anthropic_error}
"""The shape of errors on all paths that begin so; elsewhere OpenAI's."""
