"""Hold the rendering of a chat template within limits of time and memory.

A template is a program that comes with a model. Loops, calls, operators, filters and everything that is written are
counted while it runs. Each value that a template makes is weighed, its parts included, so that what is done with the
value later is bounded too: to compare it, to write it, to write it as JSON.
"""

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

import jinja2.filters
import jinja2.nodes
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

T = TypeVar("T")
MAX_SOURCE_CHARS = 1 << 20
MAX_WEIGHT = 64 << 20  # of all values and all text of one rendering: characters, and parts of containers
MAX_VALUE = 16 << 20  # of one value
MAX_NUMBER = 100_000  # of a width or a count
MAX_BITS = 4096  # of a power
MAX_RENDER_S = 2.0
PART = 64  # the weight of a place in a container
STEP = 32  # the weight of any step, even if it makes nothing
LOOK_EVERY = 1 << 14
COUNTED, WEIGHED, JOINED = "counted items", "weighed value", "joined texts"  # filters that no template can name
_LONG_NUMBER = re.compile(r"\d{6}|\*")
_BY_NUMBER = frozenset({"batch", "center", "indent", "slice", "tojson", "truncate", "wordwrap"})
_METHODS_BY_NUMBER = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill", "to_bytes"})


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """Reports a template that takes more time or memory than any chat needs."""


class RenderBudget:
    """Counts what one rendering, or one compilation, has used."""

    __slots__ = ("_deadline", "look_at", "weight")

    def __init__(self) -> None:
        self.weight = 0
        self.look_at = LOOK_EVERY  # the weight at which to look at the clock, too
        self._deadline = time.monotonic() + MAX_RENDER_S

    def look(self) -> None:
        """Raise TemplateLimitError if this is too much."""
        self.look_at = self.weight + LOOK_EVERY
        if self.weight > MAX_WEIGHT:
            raise TemplateLimitError("the template writes or computes too much")
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"the template runs longer than {MAX_RENDER_S:g} s")


_budget: ContextVar[RenderBudget] = ContextVar("template budget")
_budget_now = _budget.get


def limited(run: Callable[[], T]) -> T:
    """Return what `run` returns, within a budget of its own. Raise TemplateLimitError."""
    token = _budget.set(RenderBudget())
    try:
        return run()
    finally:
        _budget.reset(token)


def take(weight: int) -> None:
    """Count some work. Raise TemplateLimitError if it is too much."""
    budget = _budget_now()
    budget.weight += weight + STEP
    if budget.weight > budget.look_at:
        budget.look()


def weigh(value: Any) -> Any:
    """Count a value with all its parts and return it. Raise TemplateLimitError if it is too large."""
    if type(value) is str and len(value) <= MAX_VALUE:  # nearly always
        budget = _budget_now()
        budget.weight += len(value) + STEP
        if budget.weight > budget.look_at:
            budget.look()
        return value
    if value is None or value is True or value is False:
        return value
    take(_weight(value))
    return value


def _weight(value: object) -> int:
    waiting: list[Any]
    weight, waiting = 0, [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str | bytes):
            weight += len(part)
        elif isinstance(part, int):
            weight += part.bit_length() >> 3
        elif isinstance(part, dict):
            weight += PART * len(part)
            waiting += [*part, *part.values()]
        elif isinstance(part, list | tuple | set | frozenset):
            weight += PART * len(part)
            waiting += part
        if weight > MAX_VALUE:
            raise TemplateLimitError("the template makes a value that is too large")
    return weight


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TemplateLimitError(f"the template asks for a width or a count of more than {MAX_NUMBER}")


def _check_size(size: int) -> None:
    if size > MAX_VALUE:
        raise TemplateLimitError("the template makes a value that is too large")


def _check_format(text: object) -> None:
    if isinstance(text, str | bytes) and _LONG_NUMBER.search(text if isinstance(text, str) else text.decode("latin-1")):
        raise TemplateLimitError("the template formats with a width that is too large")


def _total(parts: Iterable[Any]) -> int:
    return sum([len(part) if isinstance(part, str) else 64 for part in parts])


# --- what the environment calls -------------------------------------------------------------------------


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that counts. Render within `limited`."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, finalize=weigh, **kwargs)
        self.globals.pop("lipsum", None)

    def limit_filters(self) -> None:
        """Count what the filters make. Call this when all filters are there."""
        limited_filters = {name: _limited_filter(name, made) for name, made in self.filters.items()}
        self.filters = limited_filters | {COUNTED: _counted, WEIGHED: weigh, JOINED: _joined}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # nearly always
            return weigh(left + right)
        if operator == "**":
            bits = left.bit_length() if isinstance(left, int) else 64
            _check_size(0 if not isinstance(right, int) or bits * abs(right) <= MAX_BITS else MAX_VALUE + 1)
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if hasattr(text, "__len__") and isinstance(times, int):
                    _check_size(len(text) * times)
        elif operator == "%":
            _check_format(left)
            weigh(right)
        return weigh(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes):
            _check_method(owner, getattr(__obj, "__name__", ""), args)
        return weigh(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__

        def formatted(*args: Any, **kwargs: Any) -> str:
            given = args[0] if value.__name__ == "format_map" and args else kwargs
            weigh([*args, *(given.values() if isinstance(given, Mapping) else ())])
            fields = () if value.__name__ == "format_map" else args
            return str(weigh(_Formatter(self).vformat(text, fields, given)))

        return functools.update_wrapper(formatted, value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(jinja2.nodes.For)):
            chars = sum(len(text.data) for text in loop.find_all(jinja2.nodes.TemplateData))
            loop.iter = _filtered(COUNTED, loop.iter, jinja2.nodes.Const(chars))
        return _Weighing().visit(template)  # type: ignore[no-any-return]


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        _check_format(format_spec)
        take(64)
        return weigh(super().format_field(value, format_spec))


def _check_method(owner: str | bytes, name: str, args: tuple[Any, ...]) -> None:
    """Raise TemplateLimitError for a method of a text whose result would be too large."""
    if name in _METHODS_BY_NUMBER:
        _check_numbers(args)
        _check_size(len(owner) * (args[0] if name == "expandtabs" and args and isinstance(args[0], int) else 1))
    elif name == "replace" and len(args) > 1 and isinstance(args[1], str | bytes):
        _check_size((len(owner) + 1) * len(args[1]) if not args[0] else owner.count(args[0]) * len(args[1]))
    elif name == "translate":
        raise TemplateLimitError("the template translates characters, which no chat needs")
    elif name == "join" and args:
        parts = weigh(list(args[0]))
        _check_size(_total(parts) + len(parts) * len(owner))


def _limited_filter(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    skipped = 2 if hasattr(made, "jinja_pass_arg") else 1

    @functools.wraps(made)
    def counted(*args: Any, **kwargs: Any) -> Any:
        given = [*args[skipped:], *kwargs.values()]
        if name in _BY_NUMBER:
            _check_numbers(given)
        if name == "format":
            _check_format(args[skipped - 1])
            weigh(given)
        elif name == "replace" and len(given) > 1:
            _check_method(str(args[skipped - 1]), "replace", tuple(map(str, given[:2])))
        elif name == "join":
            args = (*args[: skipped - 1], weigh(list(args[skipped - 1])), *args[skipped:])
            longest = max((len(part) for part in given if isinstance(part, str)), default=0)
            _check_size(_total(args[skipped - 1]) + len(args[skipped - 1]) * longest)
        elif name == "indent":
            _check_size(
                (str(args[skipped - 1]).count("\n") + 1) * (len(given[0]) if given and isinstance(given[0], str) else 1)
            )
        return weigh(made(*args, **kwargs))

    return counted


# --- what is changed in a template ----------------------------------------------------------------------


def _filtered(name: str, value: Any, *others: Any) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(value, name, list(others), [], None, None)


class _Weighing(jinja2.visitor.NodeTransformer):
    """Has each list, tuple and dict that a template makes weighed, and texts that it joins."""

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:  # noqa: N802
        return _filtered(WEIGHED, self.generic_visit(node)) if node.items else node

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:  # noqa: N802
        return _filtered(WEIGHED, self.generic_visit(node)) if node.items else node

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(WEIGHED, node) if node.ctx == "load" and node.items else node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(JOINED, *node.nodes)


def _counted(items: Iterable[Any], text_chars: int) -> Iterator[Any]:
    """Yield what a loop goes over. `text_chars` is the text within the loop."""
    for item in items:
        take(text_chars)
        yield item


def _joined(*values: Any) -> Any:
    return weigh("".join([str(weigh(value)) for value in values]))
