"""Formats that write arguments one by one between tags, without types: the tool's schema gives these."""

import re
from collections.abc import Sequence
from typing import ClassVar

from kvmesh.frontend.parsers.events import Tool
from kvmesh.frontend.parsers.text import escaped, marker_finder, quoted
from kvmesh.frontend.parsers.tools.machine import CallMachine, State
from kvmesh.frontend.parsers.tools.schema import TEXT, argument_types, typed

_KEY_RUN = re.compile(r"[^<>\n=]*")


def _value_ends(outer: str) -> tuple[str, ...]:
    """Return what ends a value of Qwen 3 Coder, each with the line break before it and without."""
    ends = ("</parameter>", "<parameter=", "</function>", outer)
    return tuple([lead + end for lead in ("\n", "") for end in ends])


class TaggedCalls(CallMachine):
    """The states within a value. Strings go out as they come, all else when it is complete."""

    value_end: ClassVar = ""  # closes a value
    value_ends: ClassVar[tuple[str, ...]] = ()  # also what shows that the value was not closed

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
        self._at = where
        if not marker:
            return False
        if marker.strip() == self.value_end:
            self._at += len(marker)
        self._argue('"' if self._types == TEXT else typed("".join(self._raw), self._types))
        self._raw.clear()
        self._state = self._argument_or_end
        return True

    def _words(self) -> list[str]:
        """Return all that was read of a value: a part of it may look like a tag, by where the text was cut."""
        if self._state != self._in_value:
            return super()._words()
        read, self._raw = self._raw, []
        return read

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
    tags: ClassVar = ("<parameter=", "</parameter>")
    value_end: ClassVar = "</parameter>"
    value_ends: ClassVar = _value_ends("</tool_call>")

    def _opened(self, marker: str) -> State:
        return self._in_name if marker == "<function=" else self._function_ahead

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
        ends = [(closer, self._arguments_end) for closer in self.closers]
        return self._expect(("<parameter=", self._in_key), ("</parameter>", self._argument_or_end), *ends)

    def _key_end(self) -> bool:
        """Read on after a key: `>`, or `=` in its place, or before it."""
        if self._at == len(self._text):
            return False
        if self._text[self._at] == "=":
            self._take(1)
        elif self._text[self._at] == ">":
            self._take(1)
            self._state = self._value_ahead
        else:
            return self._begin_value()
        return True

    def _value_ahead(self) -> bool:
        if self._at == len(self._text):
            return False
        if self._text[self._at] == "\n":
            self._at += 1
        return self._begin_value()


class SeedCalls(QwenCoderCalls):
    """Reads Seed-OSS's calls: those of Qwen 3 Coder between other outer tags."""

    openers: ClassVar = ("<seed:tool_call>", "<function=")
    trailers: ClassVar = ("</function>", "</seed:tool_call>")
    closers: ClassVar = ("</function>", "</seed:tool_call>")
    value_ends: ClassVar = _value_ends("</seed:tool_call>")


class GlmCalls(TaggedCalls):
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>: GLM 4.5 and later.

    GLM 4.5 and 4.6 write line breaks after the name and between the tags, which count for nothing.
    """

    openers: ClassVar = ("<tool_call>",)
    trailers: ClassVar = ("</tool_call>",)
    closers: ClassVar = ("</tool_call>",)
    tags: ClassVar = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    value_end: ClassVar = "</arg_value>"
    value_ends: ClassVar = ("</arg_value>", "<arg_key>", "</tool_call>")

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
        """Read on after a key. Models leave tags out, or write them twice."""
        if not self._skip_space():
            return False
        rest = self._text[self._at :]
        if rest[0] == "<" and any(tag.startswith(rest) for tag in self.tags + self.closers):
            return False  # too early to say
        for tag, state in (
            ("<arg_value>", self._begin_value),
            ("</arg_key>", self._value_tag_ahead),
            ("<arg_key>", self._in_key),
            ("</tool_call>", self._arguments_end),
        ):
            if rest.startswith(tag):
                self._take(len(tag))
                self._state = state
                return True
        return self._begin_value()

    def _argument_or_end(self) -> bool:
        return self._expect(
            ("<arg_key>", self._in_key),
            ("</arg_value>", self._argument_or_end),
            ("</tool_call>", self._arguments_end),
        )
