"""All endpoints of the frontend. The HTTP application, /openapi.json and the test of docs/api.md read this table."""

from collections.abc import Mapping, Sequence

from kvmesh.frontend.config import NEED_EXTENSIONS, FrontendConfig
from kvmesh.frontend.endpoint import Endpoint, ErrorShape
from kvmesh.frontend.extension import FrontendExtension
from kvmesh.frontend.mesh_api import controls, route, status, tokenize
from kvmesh.frontend.openai import chat, completions, embeddings, models
from kvmesh.mesh.extensions import load
from kvmesh.protocol.errors import ConfigError

EXTENSIONS: Sequence[FrontendExtension] = tuple(load("frontend"))


def check_settings(config: FrontendConfig, extensions: Sequence[FrontendExtension] = EXTENSIONS) -> None:
    """Raise ConfigError for a setting that an extension refuses, or that needs an extension which is not here."""
    read, default = {name for extension in extensions for name in extension.settings}, FrontendConfig()
    for name in NEED_EXTENSIONS:
        if name not in read and getattr(config, name) != getattr(default, name):
            raise ConfigError(f"--{name.replace('_', '-')} needs an extension of the frontend that is not installed")
    for extension in extensions:
        extension.check(config)


def added(*, of_vendors: bool) -> list[Endpoint]:
    """Return the endpoints that extensions add: those of vendors' APIs, or the others."""
    found = [endpoint for extension in EXTENSIONS for endpoint in extension.endpoints]
    return [endpoint for endpoint in found if endpoint.path.startswith("/v1/") is of_vendors]


ENDPOINTS: Sequence[Endpoint] = (
    chat.ENDPOINT,
    completions.ENDPOINT,
    *added(of_vendors=True),
    embeddings.ENDPOINT,
    *tokenize.ENDPOINTS,
    route.ENDPOINT,
    *controls.ENDPOINTS,
    *added(of_vendors=False),
    *models.endpoints([extension.models for extension in EXTENSIONS if extension.models is not None]),
    *status.ENDPOINTS,
)

ERRORS_BELOW: Mapping[str, ErrorShape] = {
    path: shape for extension in EXTENSIONS for path, shape in extension.errors_below.items()
}
"""The shape of errors on all paths that begin so; elsewhere OpenAI's."""
