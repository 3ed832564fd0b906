"""Refuse requests that reach no handler: no key, no such path or method, a body that is not read to its end."""

from collections.abc import Mapping, Sequence

from kvmesh.frontend.endpoint import Endpoint, ErrorShape, openai_error, request_id_headers
from kvmesh.mesh.http.connection import refusal
from kvmesh.mesh.http.request import Reply, Request
from kvmesh.mesh.http.server import Route, client_request_id
from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.ids import new_request_id

ID_PREFIX = "http"


class Refusals:
    """Gives each refusal a request id and the shape that the clients of its path read."""

    def __init__(self, endpoints: Sequence[Endpoint], below: Mapping[str, ErrorShape]) -> None:
        """Use the shape of each endpoint; `below` names shapes for whole branches of paths, endpoint or not."""
        self._shapes = {endpoint.path: endpoint.error_body for endpoint in endpoints}
        self._below = below

    def __call__(self, error: MeshError, request: Request | None, route: Route | None) -> Reply:
        shown_id = (client_request_id(request) if request is not None else None) or new_request_id(ID_PREFIX)
        shape = self._shape(request.path if request is not None else "", route)
        return refusal(error, shape(error, shown_id), request_id_headers(shown_id))

    def _shape(self, path: str, route: Route | None) -> ErrorShape:
        if route is not None and (known := self._shapes.get(route.path)) is not None:
            return known
        for beginning, shape in self._below.items():
            if f"{path}/".startswith(f"{beginning}/"):
                return shape
        return openai_error
