"""Formats that write a call as one JSON object: {"name": ..., "arguments" or "parameters": {...}}."""

import json
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvmesh.frontend.parsers.events import Event, Tool
from kvmesh.frontend.parsers.text import JsonScanner, encodable, is_json
from kvmesh.frontend.parsers.tools.machine import MAX_NAME_CHARS, CallMachine, State, is_name

_ARGUMENTS = ("arguments", "parameters")
_MAX_STRING_CHARS = 6 * MAX_NAME_CHARS + 2  # each character as \uXXXX, and the quotes


class JsonCalls(CallMachine):
    """The states within such an object. Its keys may come in any order; keys that are not known are dropped.

    The call begins with its name; an id counts if it stands before that. Without arguments, or with null, they
    are {}; a string with the JSON of an object counts as that object. A second one breaks the call off.
    """

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        """Read calls. Only an object with one of `names` is a call; without `names` any object with a name is."""
        super().__init__()
        self._names = names
        self._after_object: State = self._call_read
        self._key = ""
        self._id: str | None = None
        self._named = False
        self._argued = False  # the arguments were there
        self._early_arguments: list[str] = []  # they came before the name
        self._string: list[str] = []  # a key, a name or an id as far as it is there
        self._string_chars = 0

    def _object_ahead(self) -> bool:
        self._key, self._id, self._named, self._argued = "", None, False, False
        self._early_arguments.clear()
        return self._expect(("{", self._first_key_ahead))

    def _first_key_ahead(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[self._at] == "}":  # an object without a name
            self._give_up()
            return True
        return self._key_ahead()

    def _key_ahead(self) -> bool:
        return self._string_ahead(self._in_key)

    def _in_key(self) -> bool:
        return self._in_string(self._key_read)

    def _key_read(self, key: str) -> None:
        self._key = key
        self._state = self._colon_ahead

    def _colon_ahead(self) -> bool:
        return self._expect((":", self._value_ahead))

    def _value_ahead(self) -> bool:
        if not self._skip_space():
            return False
        self._scanner = JsonScanner()
        if self._key in _ARGUMENTS:
            self._begin_arguments(self._text[self._at])
            return True
        if self._key == "name":
            return self._string_ahead(self._in_name)
        if self._key == "id" and not self._named and self._text[self._at] == '"':
            return self._string_ahead(self._in_id)
        self._state = self._in_other
        return True

    def _in_name(self) -> bool:
        return self._in_string(self._name_read)

    def _name_read(self, name: str) -> None:
        if self._named or not is_name(name) or (self._names and name not in self._names):
            self._give_up()
            return
        self._named = True
        self._begin(name, self._id)
        self._argue("".join(self._early_arguments))
        self._state = self._next_ahead

    def _in_id(self) -> bool:
        return self._in_string(self._id_read)

    def _id_read(self, call_id: str) -> None:
        self._id = call_id if is_name(call_id) else None
        self._state = self._next_ahead

    def _begin_arguments(self, char: str) -> None:
        if self._argued or char not in '{"n[':
            self._give_up()
        elif char in "n[":
            self._string.clear()
            self._state = self._in_no_arguments
        elif char == '"':
            self._string.clear()
            self._state = self._in_arguments_string
        else:
            self._argued = True
            if self._named:
                self._raw.clear()
            self._after_arguments = self._next_ahead
            self._state = self._arguments if self._named else self._in_early_arguments

    def _in_no_arguments(self) -> bool:
        """Read null or an empty list in place of an object."""
        self._string.append(self._scan(len(self._text)))
        return self._scanned(self._no_arguments_read)

    def _no_arguments_read(self) -> bool:
        if json.loads("".join(self._string)):
            self._give_up()
        else:
            self._state = self._next_ahead
        return True

    def _in_arguments_string(self) -> bool:
        self._string.append(self._scan(len(self._text)))
        return self._scanned(self._arguments_string_read)

    def _arguments_string_read(self) -> bool:
        arguments: str = json.loads("".join(self._string))
        if not arguments.strip():
            self._state = self._next_ahead
            return True
        if not (arguments.startswith("{") and is_json(arguments) and encodable(arguments)):
            self._give_up()
            return True
        self._argued = True
        self._state = self._next_ahead
        if self._named:
            self._raw.clear()
            self._argue(arguments)
        else:
            self._early_arguments.append(arguments)
        return True

    def _in_early_arguments(self) -> bool:
        self._early_arguments.append(self._scan(len(self._text)))
        return self._scanned(self._next_ahead)

    def _in_other(self) -> bool:
        """The value of a key that does not count."""
        self._scan(len(self._text))
        return self._scanned(self._next_ahead)

    def _next_ahead(self) -> bool:
        return self._expect((",", self._key_ahead), ("}", self._object_read))

    def _object_read(self) -> bool:
        if not self._named:
            self._give_up()
            return True
        if not self._argued:
            self._argue("{}")
        self._in_call = False
        self._raw.clear()
        self._state = self._after_object
        return True

    def _next_object(self) -> bool:
        """Read on in an array of objects."""
        return self._expect((",", self._object_ahead), ("]", self._call_read))

    # --- steps ----------------------------------------------------------------------------------------

    def _string_ahead(self, within: State) -> bool:
        if not self._skip_space():
            return False
        if self._text[self._at] != '"':
            self._give_up()
            return True
        self._scanner = JsonScanner()
        self._string.clear()
        self._string_chars = 0
        self._state = within
        return True

    def _in_string(self, read: Callable[[str], None]) -> bool:
        start = self._at
        self._string.append(self._scan(min(len(self._text), start + _MAX_STRING_CHARS - self._string_chars)))
        self._string_chars += self._at - start
        if self._scanner.done:
            read(json.loads("".join(self._string)))
        elif self._scanner.broken or self._string_chars == _MAX_STRING_CHARS:
            self._give_up()
        else:
            return False
        return True

    def _scan(self, end: int) -> str:
        start = self._at
        fragment, stop = self._scanner.feed(self._text, start, end)
        self._take(stop - start)
        return fragment


class HermesCalls(JsonCalls):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, once per call: Hermes, Qwen 2.5, Qwen 3."""

    openers: ClassVar = ("<tool_call>",)
    trailers: ClassVar = ("</tool_call>",)
    closers: ClassVar = ("</tool_call>",)

    def _opened(self, marker: str) -> State:
        return self._object_ahead


class LlamaCalls(JsonCalls):
    """{"name": ..., "parameters": {...}} where the answer begins, or after <|python_tag|>; more follow after `;`.

    Llama 4 has <|python_start|> and <|python_end|> in place of the tag. Without any of them, only an object with
    the name of a tool is a call: an answer may well be JSON.
    """

    openers: ClassVar = ("<|python_tag|>", "<|python_start|>")
    trailers: ClassVar = ("<|python_end|>",)
    closers: ClassVar = ("<|python_end|>",)

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._known = frozenset(tool.name for tool in tools)

    def _opened(self, marker: str) -> State:
        self._names = frozenset()
        return self._object_ahead

    def _bare(self, char: str) -> State | None:
        if char == ";" and self._calls:
            return self._separator_ahead
        if char != "{":
            return None
        self._names = self._known
        return self._object_ahead

    def _separator_ahead(self) -> bool:
        self._take(1)
        self._state = self._after_separator
        return True

    def _after_separator(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[self._at] == "{":
            self._names = self._known
            self._state = self._object_ahead
        else:
            self._give_up()
        return True


class ForcedCalls(CallMachine):
    """Reads an answer that a guide holds to calls and nothing else.

    Where such an answer ends early, the text that is left is the beginning of a call or what stands between calls. It
    is dropped: a client that forced a call gets no prose.
    """

    def flush(self) -> Sequence[Event]:
        super().flush()
        return ()


class CallsAsJson(ForcedCalls, JsonCalls):
    """An answer that a guide holds to `required_schema`: [{"name": ..., "parameters": {...}}, ...] and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._after_object = self._next_object

    def _bare(self, char: str) -> State | None:
        return self._array_ahead if char == "[" and not self._calls else None

    def _array_ahead(self) -> bool:
        return self._expect(("[", self._object_ahead))


class ArgumentsAsJson(ForcedCalls):
    """An answer that a guide holds to `named_schema`: the arguments of one call of `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _bare(self, char: str) -> State | None:
        return self._begin_here if char == "{" and not self._calls else None

    def _begin_here(self) -> bool:
        self._begin(self._name)
        self._state = self._arguments
        return True
