"""Read calls where only some of the tools that a model knows may be called."""

from collections.abc import Iterator, Sequence

from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Parser
from kvmesh.frontend.parsers.text import quoted


class AllowedCalls:
    """Lets the calls of some tools pass. A call of another tool is prose: Content, as a JSON object."""

    def __init__(self, calls: Parser, names: frozenset[str]) -> None:
        self._calls = calls
        self._names = names
        self._passed = 0  # calls so far
        self._in_refused = False

    @property
    def is_plain(self) -> bool:
        return self._calls.is_plain and not self._in_refused

    def push(self, text: str) -> Sequence[Event]:
        return list(self._allowed(self._calls.push(text)))

    def flush(self) -> Sequence[Event]:
        return [*self._allowed(self._calls.flush()), *self._end_refused()]

    def _allowed(self, events: Sequence[Event]) -> Iterator[Event]:
        for event in events:
            match event:
                case CallArguments(_, fragment):
                    yield Content(fragment) if self._in_refused else CallArguments(self._passed - 1, fragment)
                case CallBegun(_, name, call_id):
                    yield from self._end_refused()
                    yield self._begun(name, call_id)
                case _:
                    yield from self._end_refused()
                    yield event

    def _begun(self, name: str, call_id: str | None) -> Event:
        if name not in self._names:
            self._in_refused = True
            return Content(f'{{"name": {quoted(name)}, "arguments": ')
        self._passed += 1
        return CallBegun(self._passed - 1, name, call_id)

    def _end_refused(self) -> Iterator[Event]:
        if self._in_refused:
            self._in_refused = False
            yield Content("}")
