"""Parameters that several APIs have under different names: tools, output formats, template options, hints. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec

from kvmesh.frontend.bodies import refuse
from kvmesh.frontend.generator import Hints
from kvmesh.frontend.parsers.events import Tool
from kvmesh.frontend.parsers.tools import named_schema, required_schema, without_annotations
from kvmesh.frontend.request import ToolChoice, Tools
from kvmesh.frontend.shapes import KvmeshOptions
from kvmesh.protocol.messages import Guide, GuideKind

LEAST_TOP_P = 1e-9  # 0 is allowed, and leaves the likeliest token
MAX_SCHEMA_DEPTH = 96  # Python's recursion ends deeper schemas anywhere on their way
MAX_SCHEMA_BYTES = 1 << 20  # it goes out with each answer of a request
RESERVED_OPTIONS = frozenset({"messages", "tools", "add_generation_prompt"})
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


def or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def hints_of(options: KvmeshOptions | None, session: str | None) -> Hints:
    """Return the hints that the body gives; `session`: the name of the user, in the words of the API."""
    if options is None:
        return Hints(session=session or "")
    return Hints(
        disaggregate=options.disaggregate,
        pin=options.worker,
        session=session or "",
        explain=bool(options.explain),
    )


# --- tools --------------------------------------------------------------------------------------------


class DeclaredTool(NamedTuple):
    """A function as the body declares it."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None  # JSON schema
    strict: bool | None = None


class ToolWish(NamedTuple):
    """The meaning of the parameter `tool_choice`."""

    choice: ToolChoice = ToolChoice.AUTO
    named: str = ""  # with ToolChoice.NAMED
    allowed: tuple[str, ...] | None = None  # only these may be called, and all tools are shown; None: all may
    allowed_param: str = ""  # the body's list of these


def check_tool_name(name: str, param: str) -> None:
    """Raise InvalidRequestError if a model or a schema may stumble over the name."""
    if not _TOOL_NAME.fullmatch(name):
        refuse(param, "use letters, digits, and . _ : / -")


def refuse_choice_without_tools() -> NoReturn:
    refuse("tool_choice", "there are no tools to choose from; send tools")


def tools_of(declared: Sequence[DeclaredTool], wish: ToolWish, *, parallel: bool) -> Tools | None:
    """Return what the model may call, None if it is to know of no tool. Raise InvalidRequestError."""
    if not declared:
        if wish.choice not in (ToolChoice.NONE, ToolChoice.AUTO) or wish.allowed is not None:
            refuse_choice_without_tools()
        return None
    if wish.choice is ToolChoice.NONE:
        return None
    if wish.named and wish.named not in {tool.name for tool in declared}:
        refuse("tool_choice", f"{wish.named!r} is none of the tools")
    callable_ = declared if wish.allowed is None else _allowed(declared, wish.allowed, wish.allowed_param)
    functions = tuple([Tool(tool.name, tool.parameters or {}, bool(tool.strict)) for tool in callable_])
    shown = tuple([_shown(tool) for tool in declared])
    return Tools(functions, shown, wish.choice, wish.named, parallel, len(functions) < len(shown))


def _allowed(declared: Sequence[DeclaredTool], names: Sequence[str], param: str) -> list[DeclaredTool]:
    """Return the tools that may be called. Raise InvalidRequestError for a name that no tool has."""
    known = {tool.name for tool in declared}
    for n, name in enumerate(names):
        if name not in known:
            refuse(f"{param}[{n}]", f"{name!r} is none of the tools")
    return [tool for tool in declared if tool.name in names]


def _shown(tool: DeclaredTool) -> dict[str, Any]:
    """Return the tool as chat templates expect it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


# --- structured output --------------------------------------------------------------------------------


def guide_of(wanted: Guide | None, tools: Tools | None, param: str) -> Guide | None:
    """Return what the answer is held to: the format `wanted`, which the body asks for under the name `param`, or the
    format of a call that is forced. Raise InvalidRequestError if the body asks for both."""
    if tools is None or tools.is_free:
        return wanted
    if wanted is not None:
        refuse(param, "a call that is forced by tool_choice has a format of its own; send one of them")
    if tools.choice is ToolChoice.NAMED:
        [tool] = [tool for tool in tools.functions if tool.name == tools.named][:1]
        return schema_guide(named_schema(tool), strict=tool.strict)
    strict = all(tool.strict for tool in tools.functions)
    return schema_guide(required_schema(tools.functions, tools.parallel), strict=strict)


def schema_guide(schema: dict[str, Any], param: str = "tools", *, strict: bool | None = False) -> Guide:
    """Return the guide to a schema that came as `param`. A `format` that no engine knows counts only if it is `strict`.

    Raise InvalidRequestError if the schema is too deep or too large.
    """
    if is_deeper(schema, MAX_SCHEMA_DEPTH):
        refuse(param, f"a schema is nested deeper than {MAX_SCHEMA_DEPTH} levels; flatten it, or use $defs")
    text = msgspec.json.encode(schema if strict else without_annotations(schema))
    if len(text) > MAX_SCHEMA_BYTES:
        refuse(param, f"what the answer is held to has {len(text)} bytes of schema, more than {MAX_SCHEMA_BYTES}")
    return Guide(kind=GuideKind.JSON_SCHEMA, value=text.decode())


def is_deeper(value: object, most: int) -> bool:
    """Return whether JSON is nested in more than `most` levels."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        inner = [part for item in level for part in (item.values() if isinstance(item, dict) else item)]
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return False
    return bool(level)


# --- chat templates -----------------------------------------------------------------------------------


def template_options(
    given: Mapping[str, Any] | None, reasoning_effort: str | None, documents: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Return the names that a chat template may read; `given` stands under `chat_template_kwargs`.

    Raise InvalidRequestError if one of them is given by the request itself.
    """
    options = dict(given or {})
    if taken := sorted(RESERVED_OPTIONS & options.keys()):
        refuse(f"chat_template_kwargs.{taken[0]}", "it is given by the request itself")
    if options.get("documents") is not None:
        if documents is not None:
            refuse("chat_template_kwargs.documents", "'documents' is given beside it; send one of them")
        _check_documents(options["documents"])
    elif documents is not None:
        options["documents"] = documents
    if reasoning_effort is not None:
        options["reasoning_effort"] = reasoning_effort
        if reasoning_effort == "none":
            options.setdefault("enable_thinking", False)
    return options


def _check_documents(documents: object) -> None:
    """Raise InvalidRequestError for documents that a template would stumble over."""
    if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
        refuse("chat_template_kwargs.documents", "expected a list of objects")
