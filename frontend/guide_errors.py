"""Say what is wrong with a guide in the words of the request that it came from.

A worker knows a guide only: a schema, and where in it the fault is. The caller sent a response format, or tools. Pure.
"""

import re

from kvmesh.frontend.request import ParsedRequest, ToolChoice, Tools
from kvmesh.protocol.errors import InvalidRequestError, MeshError

GUIDE = "guide"  # the name of the parameter among workers; "guide#/a/b" names the place in a schema
_MOVED = re.compile(r"tool(\d+)_(defs|definitions)_(.*)", re.DOTALL)  # a definition of one of several tools
_CALL = ("items", "anyOf")  # where the schemas of several tools stand, each in the place of its number
_PARAMETERS = ("properties", "parameters")

Path = tuple[str, ...]


def in_callers_words(error: MeshError, parsed: ParsedRequest) -> MeshError:
    """Return the error with the name of the caller's parameter, and for a schema with the place in the caller's."""
    name, is_schema, pointer = (error.param or "").partition("#")
    if name != GUIDE or not isinstance(error, InvalidRequestError):
        return error
    tools = parsed.tools
    if tools is not None and not tools.is_free:
        tool, path = _of_tool(tools, path_of(pointer))
        param = "tools" if tool is None else parsed.names.tool_schema.format(_number(tools, tool))
        what = "tools" if tool is None else f"function {tool!r}"
    else:
        path, what = path_of(pointer), parsed.names.format
        param = parsed.names.schema if is_schema else parsed.names.format
    context = f"In context={path!r}, " if path else ""
    message = f"Invalid schema for {what}: {context}{error.message}" if is_schema else error.message
    return type(error)(message, hint=error.hint, param=param)


def path_of(pointer: str) -> Path:
    """Return the steps of a JSON pointer."""
    return tuple([step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]])


def _of_tool(tools: Tools, path: Path) -> tuple[str | None, Path]:
    """Return the tool into whose parameters a path leads, None if it leads elsewhere, and the path in them."""
    if tools.choice is ToolChoice.NAMED:
        return tools.named, path
    if path[:1] == ("$defs",) and len(path) > 1 and (moved := _MOVED.fullmatch(path[1])):
        keyword = "$defs" if moved[2] == "defs" else moved[2]
        return _name(tools, moved[1]), (keyword, moved[3], *path[2:])
    if path[:2] == _CALL and len(path) > 2:
        rest = path[3:]
        return _name(tools, path[2]), rest[2:] if rest[:2] == _PARAMETERS else rest
    return None, path


def _name(tools: Tools, number: str) -> str | None:
    names = dict(enumerate([tool.name for tool in tools.functions]))
    return names.get(int(number)) if number.isdecimal() else None


def _number(tools: Tools, name: str) -> int:
    """Return the tool's number among all that the body declares."""
    return [tool["function"]["name"] for tool in tools.shown].index(name)
