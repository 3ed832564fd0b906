"""The seam for extensions of the frontend: what an extension may add to one, and what it gets for that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.frontend.endpoint import Endpoint, ErrorShape, Handler
from kvmesh.frontend.operation import Kind
from kvmesh.mesh.http.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsShape:
    """The shape of the list of models for clients of another API, which ask at the same paths as OpenAI's."""

    is_client: Callable[[Request], bool]
    list_models: Handler
    show_model: Handler
    page: Kind
    model: Kind
    error: Kind
    error_body: ErrorShape
    note: str  # to the summary of the endpoint
    query: Mapping[str, str]  # descriptions of its fields, which are texts


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendExtension:
    """The parts that one extension adds to the frontend: the `EXTENSION` of its module `extension`."""

    endpoints: Sequence[Endpoint] = ()
    errors_below: Mapping[str, ErrorShape] = field(default_factory=dict)  # on all paths that begin so
    models: ModelsShape | None = None
