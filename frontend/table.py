"""All endpoints of the frontend. The HTTP application, /openapi.json and the test of docs/api.md read this table."""

from collections.abc import Mapping, Sequence

from kvmesh.frontend.endpoint import Endpoint, ErrorShape
from kvmesh.frontend.extension import FrontendExtension
from kvmesh.frontend.mesh_api import controls, route, status, tokenize
from kvmesh.frontend.openai import chat, completions, embeddings, models
from kvmesh.mesh.extensions import load

EXTENSIONS: Sequence[FrontendExtension] = tuple(load("frontend"))


def added_below(path: str) -> list[Endpoint]:
    """Return the endpoints that extensions add below a path."""
    added = [endpoint for extension in EXTENSIONS for endpoint in extension.endpoints]
    return [endpoint for endpoint in added if endpoint.path.startswith(path)]


ENDPOINTS: Sequence[Endpoint] = (
    chat.ENDPOINT,
    completions.ENDPOINT,
    *added_below("/v1/"),
    embeddings.ENDPOINT,
    *tokenize.ENDPOINTS,
    route.ENDPOINT,
    *controls.ENDPOINTS,
    *added_below("/kvmesh/"),
    *models.endpoints([extension.models for extension in EXTENSIONS if extension.models is not None]),
    *status.ENDPOINTS,
)

ERRORS_BELOW: Mapping[str, ErrorShape] = {
    path: shape for extension in EXTENSIONS for path, shape in extension.errors_below.items()
}
"""The shape of errors on all paths that begin so; elsewhere OpenAI's."""
