"""Formats that write the name of a call in a header and its arguments as JSON after that."""

import re
from typing import ClassVar

from kvmesh.frontend.parsers.tools.machine import CallMachine, State, is_name
from kvmesh.frontend.parsers.tools.objects import JsonCalls

_COUNT = re.compile(r":[0-9]+$")


class MistralCalls(JsonCalls):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or since tokenizer v11, once per call,

    [TOOL_CALLS]name[ARGS]{...}, with or without [ARGS], and with [CALL_ID]id before that.
    """

    openers: ClassVar = ("[TOOL_CALLS]",)

    def __init__(self) -> None:
        super().__init__()
        self._header_name = ""

    def _opened(self, marker: str) -> State:
        return self._array_or_header

    def _array_or_header(self) -> bool:
        if not self._skip_space():
            return False
        match self._text[self._at]:
            case "[":
                self._take(1)
                self._after_object, self._state = self._next_object, self._object_ahead
            case "{":
                self._after_object, self._state = self._call_read, self._object_ahead
            case _:
                self._state = self._in_header
        return True

    def _in_header(self) -> bool:
        name = self._word()
        if name is None:
            return False
        self._header_name, self._id = name, None
        self._state = self._after_name
        if not name:
            self._give_up()
        return True

    def _after_name(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[self._at] == "{":
            return self._header_read()
        return self._expect(("[ARGS]", self._header_read), ("[CALL_ID]", self._in_call_id))

    def _in_call_id(self) -> bool:
        call_id = self._word()
        if call_id is None:
            return False
        self._id = call_id or None
        self._state = self._after_call_id
        return True

    def _after_call_id(self) -> bool:
        return self._expect(("[ARGS]", self._header_read))

    def _header_read(self) -> bool:
        self._begin(self._header_name, self._id)
        self._after_arguments, self._state = self._call_read, self._arguments_ahead
        return True


class SectionedCalls(CallMachine):
    """A section of calls, each with its own marker, a header and a marker after that."""

    call: ClassVar = ""
    after_header: ClassVar = ""

    def __init__(self) -> None:
        super().__init__()
        self._header = ""

    def _opened(self, marker: str) -> State:
        return self._header_ahead if marker == self.call else self._first_call_ahead

    def _first_call_ahead(self) -> bool:
        return self._expect((self.call, self._header_ahead))

    def _header_ahead(self) -> bool:
        if not self._skip_space() or (header := self._word()) is None:
            return False
        self._header = header
        self._state = self._header_end
        if not header:
            self._give_up()
        return True

    def _header_end(self) -> bool:
        return self._expect((self.after_header, self._header_read))

    def _header_read(self) -> bool:
        raise NotImplementedError

    def _begin_here(self) -> bool:
        self._begin(self._header)
        self._state = self._arguments_ahead
        return True


DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)


class DeepseekCalls(SectionedCalls):
    """Reads DeepSeek's calls. V3 and R1 write the type of a tool, its name, and the arguments in a fenced block,

        <｜tool▁call▁begin｜>function<｜tool▁sep｜>name, a line ```json, {...}, a line ```<｜tool▁call▁end｜>

    V3.1 <｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>. Both with or without a fence.
    """

    call: ClassVar = "<｜tool▁call▁begin｜>"
    after_header: ClassVar = "<｜tool▁sep｜>"
    openers: ClassVar = DEEPSEEK_MARKERS[:2]
    trailers: ClassVar = ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    closers: ClassVar = DEEPSEEK_MARKERS[3:]
    tags: ClassVar = ("```",)

    def _header_read(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[self._at] in "{`<":
            return self._fence_or_arguments()
        self._state = self._in_name
        return True

    def _in_name(self) -> bool:
        name = self._word()
        if name is None:
            return False
        self._header = name
        self._state = self._fence_or_arguments
        if not name:
            self._give_up()
        return True

    def _fence_or_arguments(self) -> bool:
        """Read what may follow the name of a call."""
        if not self._skip_space():
            return False
        match self._text[self._at]:
            case "{":
                return self._begin_here()
            case "<":
                return self._expect(*((closer, self._without_arguments) for closer in self.closers))
        for fence in ("```json", "```"):
            if (starts := self._starts(fence)) is not False:
                if starts:
                    self._take(len(fence))
                    self._begin_here()
                return starts is True
        self._give_up()
        return True

    def _without_arguments(self) -> bool:
        self._begin(self._header)
        return self._no_arguments()


KIMI_MARKERS = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_end|>",
)


class KimiCalls(SectionedCalls):
    """Reads Kimi K2's calls: <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>.

    What stands before the arguments is the call's id.
    """

    call: ClassVar = "<|tool_call_begin|>"
    after_header: ClassVar = "<|tool_call_argument_begin|>"
    openers: ClassVar = KIMI_MARKERS[:3]
    trailers: ClassVar = KIMI_MARKERS[4:]
    closers: ClassVar = KIMI_MARKERS[4:]

    def _header_read(self) -> bool:
        name = _COUNT.sub("", self._header).removeprefix("functions.")
        if is_name(name):
            self._begin(name, self._header)
            self._state = self._arguments_ahead
        else:
            self._give_up()
        return True
