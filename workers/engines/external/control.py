"""Read what operators ask of an engine."""

from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import Control


def argument(request: Control, name: str) -> str:
    """Return the argument `name`. Raise InvalidRequestError if it is missing or empty."""
    if not (value := request.arguments.get(name, "")):
        raise InvalidRequestError(f"{request.action.value} needs {name!r}", hint="give it as an argument", param=name)
    return value
