"""Formats that write arguments one by one between tags, without types: the tool's schema gives these."""

import re
from collections.abc import Sequence
from typing import ClassVar

from kvmesh.frontend.parsers.events import Tool
from kvmesh.frontend.parsers.text import escaped, marker_finder, quoted
from kvmesh.frontend.parsers.tools.machine import CallMachine, State
from kvmesh.frontend.parsers.tools.schema import TEXT, argument_types, typed

_KEY_RUN = re.compile(r"[^<>\n]*")


class TaggedCalls(CallMachine):
    """The states within a value. Strings go out as they come, all else when it is complete."""

    value_ends: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._name = ""
        self._key = ""
        self._value_ends = marker_finder(self.value_ends)
        self._types: frozenset[str] = TEXT
        self._arguments_told = 0  # of the call that is open

    def _read_name(self) -> bool:
        if (name := self._word()) is None:
            return False
        self._name = name
        self._state = self._name_end
        if not name:
            self._give_up()
        return True

    def _in_key(self) -> bool:
        key = self._word(_KEY_RUN)
        if key is None:
            return False
        self._key = key.strip()
        self._state = self._key_end
        if not self._key:
            self._give_up()
        return True

    def _begin_call(self) -> None:
        self._begin(self._name)
        self._arguments_told = 0

    def _begin_value(self) -> bool:
        """Begin the value of the argument `_key`."""
        self._types = argument_types(self._schemas.get(self._name, {}), self._key)
        lead = ("{" if not self._arguments_told else ", ") + quoted(self._key) + ": "
        self._argue(lead + '"' if self._types == TEXT else lead)
        self._arguments_told += 1
        self._raw.clear()
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        where, marker = self._value_ends.find(self._text, self._at)
        self._more_value(self._text[self._at : where])
        self._at = where + len(marker)
        if not marker:
            return False
        self._argue('"' if self._types == TEXT else typed("".join(self._raw), self._types))
        self._raw.clear()
        self._state = self._argument_or_end
        return True

    def _more_value(self, text: str) -> None:
        if self._types == TEXT:
            self._argue(escaped(text))
        else:
            self._raw.append(text)

    def _name_end(self) -> bool:
        raise NotImplementedError

    def _key_end(self) -> bool:
        raise NotImplementedError

    def _argument_or_end(self) -> bool:
        raise NotImplementedError

    def _arguments_end(self) -> bool:
        self._argue("}" if self._arguments_told else "{}")
        self._end()
        return True


class QwenCoderCalls(TaggedCalls):
    """<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>: Qwen 3 Coder.

    The line break after a parameter's opening tag and the one before its closing tag are not part of the value.
    The outer tag may be missing, as these models sometimes leave it out.
    """

    openers: ClassVar = ("<tool_call>", "<function=")
    trailers: ClassVar = ("</function>", "</tool_call>")
    closers: ClassVar = ("</function>", "</tool_call>")
    value_ends: ClassVar = ("\n</parameter>", "</parameter>")

    def _opened(self, marker: str) -> State:
        return self._function_ahead if marker == "<tool_call>" else self._in_name

    def _function_ahead(self) -> bool:
        return self._expect(("<function=", self._in_name))

    def _in_name(self) -> bool:
        return self._read_name()

    def _name_end(self) -> bool:
        return self._expect((">", self._name_read))

    def _name_read(self) -> bool:
        self._begin_call()
        self._state = self._argument_or_end
        return True

    def _argument_or_end(self) -> bool:
        return self._expect(
            ("<parameter=", self._in_key), ("</function>", self._arguments_end), ("</tool_call>", self._arguments_end)
        )

    def _key_end(self) -> bool:
        return self._expect((">", self._value_ahead))

    def _value_ahead(self) -> bool:
        if self._at == len(self._text):
            return False
        if self._text[self._at] == "\n":
            self._at += 1
        return self._begin_value()


class GlmCalls(TaggedCalls):
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>: GLM 4.5 and later.

    GLM 4.5 and 4.6 write line breaks after the name and between the tags, which count for nothing.
    """

    openers: ClassVar = ("<tool_call>",)
    trailers: ClassVar = ("</tool_call>",)
    closers: ClassVar = ("</tool_call>",)
    value_ends: ClassVar = ("</arg_value>",)

    def _opened(self, marker: str) -> State:
        return self._name_ahead

    def _name_ahead(self) -> bool:
        return self._skip_space() and self._read_name()

    def _name_end(self) -> bool:
        return self._expect(("<arg_key>", self._first_key), ("</tool_call>", self._no_keys))

    def _first_key(self) -> bool:
        self._begin_call()
        self._raw.append("<arg_key>")  # not part of the header
        self._state = self._in_key
        return True

    def _no_keys(self) -> bool:
        self._begin_call()
        return self._arguments_end()

    def _key_end(self) -> bool:
        return self._expect(("</arg_key>", self._value_tag_ahead))

    def _value_tag_ahead(self) -> bool:
        return self._expect(("<arg_value>", self._begin_value))

    def _argument_or_end(self) -> bool:
        return self._expect(("<arg_key>", self._in_key), ("</tool_call>", self._arguments_end))
