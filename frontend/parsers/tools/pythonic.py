"""Calls written as a list in Python: [f(a=1, b="x"), g()]."""

import re
from collections.abc import Sequence
from typing import ClassVar

from kvmesh.frontend.parsers.events import Tool
from kvmesh.frontend.parsers.text import quoted
from kvmesh.frontend.parsers.tools.literals import json_of_literal
from kvmesh.frontend.parsers.tools.machine import CallMachine, State

_KEYWORD_RUN = re.compile(r"\w*")
_PLAIN_RUN = re.compile(r"""[^'"\[\](){},]*""")
_STRING_RUNS = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}


class PythonicCalls(CallMachine):
    """Llama 3.2 and 4 (also between <|python_start|> and <|python_end|>), and others that follow them.

    Without a marker, calls stand where the answer begins and name one of the tools: an answer may well begin
    with a list. Arguments are named, their values literals; each goes out when it is complete.
    """

    openers: ClassVar = ("<|python_start|>", "<|tool_call_start|>")
    trailers: ClassVar = ("<|python_end|>", "<|tool_call_end|>")
    closers: ClassVar = ("<|python_end|>", "<|tool_call_end|>")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._known = frozenset(tool.name for tool in tools)
        self._keys = {tool.name: _names_of(tool) for tool in tools}
        self._name = ""
        self._word_read = ""
        self._arguments_told = 0  # of the call that is open
        self._depth = 0  # of brackets, within a value
        self._quote = ""  # the one that is open, within a value
        self._escaped = False

    def _opened(self, marker: str) -> State:
        return self._list_ahead

    def _bare(self, char: str) -> State | None:
        return self._list_ahead if char == "[" and not self._calls else None

    def _list_ahead(self) -> bool:
        return self._expect(("[", self._name_ahead))

    def _name_ahead(self) -> bool:
        if not self._skip_space() or (name := self._word()) is None:
            return False
        self._word_read = name
        self._state = self._parenthesis_ahead
        if not name or (self._known and name not in self._known):
            self._give_up()
        return True

    def _parenthesis_ahead(self) -> bool:
        return self._expect(("(", self._name_read))

    def _name_read(self) -> bool:
        self._name = self._word_read
        self._begin(self._name)
        self._arguments_told = 0
        self._state = self._argument_or_end
        return True

    def _argument_or_end(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[self._at] == ")":
            self._take(1)
            return self._arguments_read()
        if (keyword := self._word(_KEYWORD_RUN)) is None:
            return False
        self._word_read = keyword
        self._state = self._equals_or_value
        return True

    def _equals_or_value(self) -> bool:
        """Read on after a word: the name of an argument, or the value of one that is given by its place."""
        if not self._skip_space():
            return False
        if self._word_read and self._text[self._at] == "=":
            self._take(1)
            self._raw.clear()
            return self._begin_value(self._word_read)
        keys = self._keys.get(self._name, ())
        if self._arguments_told < len(keys):
            self._raw = [self._word_read]
            return self._begin_value(keys[self._arguments_told])
        self._give_up()
        return True

    def _begin_value(self, key: str) -> bool:
        """Begin a value, of which `_raw` holds what was read."""
        self._argue(("{" if not self._arguments_told else ", ") + quoted(key) + ": ")
        self._arguments_told += 1
        self._depth, self._quote, self._escaped = 0, "", False
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        """Up to a comma or parenthesis that is in no bracket and no string."""
        text, at = self._text, self._at
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            at = _end_of_run(_STRING_RUNS.get(self._quote, _PLAIN_RUN), text, at)
            if at == len(text):
                break
            if not self._quote and self._depth == 0 and text[at] in "),]}":
                self._take(at - self._at)
                self._state = self._value_read
                return True
            self._follow(text[at])
            at += 1
        self._take(at - self._at)
        return False

    def _follow(self, char: str) -> None:
        if self._quote:
            if char == "\\":
                self._escaped = True
            else:
                self._quote = ""
        elif char in _STRING_RUNS:
            self._quote = char
        elif char in "[({":
            self._depth += 1
        elif char in "])}":
            self._depth -= 1

    def _value_read(self) -> bool:
        value = json_of_literal("".join(self._raw))
        if value is None:
            self._give_up()
            return True
        self._argue(value)
        self._raw.clear()
        self._state = self._next_ahead
        return True

    def _next_ahead(self) -> bool:
        return self._expect((",", self._argument_or_end), (")", self._arguments_read))

    def _arguments_read(self) -> bool:
        self._argue("}" if self._arguments_told else "{}")
        self._in_call = False
        self._raw.clear()
        self._state = self._next_call_ahead
        return True

    def _next_call_ahead(self) -> bool:
        return self._expect((",", self._name_ahead), ("]", self._call_read))


def _names_of(tool: Tool) -> tuple[str, ...]:
    properties = tool.parameters.get("properties")
    return tuple(properties) if isinstance(properties, dict) else ()


def _end_of_run(run: re.Pattern[str], text: str, at: int) -> int:
    found = run.match(text, at)
    return found.end() if found else at
