"""Name the functions that a request groups in namespaces: models and their templates know one name for each. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvmesh.frontend.bodies import refuse
from kvmesh.frontend.responses.shapes import FunctionTool

_BETWEEN = "__"  # as between the server and the tool in the names of MCP tools


class ToolGroup(NamedTuple):
    """Holds one entry of `tools`: a single function, or the functions of a namespace."""

    functions: Sequence[FunctionTool]
    namespace: str = ""
    description: str = ""  # of the namespace


class FullName(NamedTuple):
    """Names a function as clients know it."""

    namespace: str
    name: str


def written_name(namespace: str | None, name: str) -> str:
    """Return the one name by which the model calls a function."""
    return f"{namespace}{_BETWEEN}{name}" if namespace else name


def flat(groups: Sequence[ToolGroup]) -> list[FunctionTool]:
    """Return all functions under the names that the model writes.

    The description of a namespace goes before the description of its first function, because templates have no place
    for it.
    """
    return [
        replace(
            spec,
            name=written_name(group.namespace, spec.name),
            description=spec.description if n else _joined(group.description, spec.description),
        )
        for group in groups
        for n, spec in enumerate(group.functions)
    ]


def _joined(of_namespace: str, description: str | None) -> str | None:
    return "\n".join([text for text in (of_namespace, description) if text]) if of_namespace else description


def full_names(groups: Sequence[ToolGroup]) -> Mapping[str, FullName]:
    """Return the functions of namespaces, by the names that the model writes.

    Raise InvalidRequestError if two functions would be written alike.
    """
    plain = {spec.name for group in groups if not group.namespace for spec in group.functions}
    found: dict[str, FullName] = {}
    for group in groups:
        for spec in group.functions if group.namespace else ():
            name = written_name(group.namespace, spec.name)
            if name in plain or name in found:
                refuse("tools", f"two functions are called {name!r}; rename one of them")
            found[name] = FullName(group.namespace, spec.name)
    return found
