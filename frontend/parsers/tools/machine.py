"""Share what the parsers of all formats need: prose around calls, text that is kept until it is known what it is."""

import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event
from kvmesh.frontend.parsers.text import JsonScanner, marker_finder

State = Callable[[], bool]  # reads on; False: it needs more text

_SPACE_RUN = re.compile(r"\s*")
_NAME_RUN = re.compile(r"[\w.:/@$+-]*")
MAX_NAME_CHARS = 256  # of a call, its id or an argument; a longer one is no name


def is_name(text: str) -> bool:
    """A name that a function may have."""
    return 0 < len(text) <= MAX_NAME_CHARS and _NAME_RUN.fullmatch(text) is not None


class CallMachine:
    """Reads prose with calls in it. A format is a subclass: its markers, and the states within a call.

    Text that is read but not told yet lies in `_raw`. It is dropped where a call goes on as it should, and comes
    out as Content, exactly as written, where it does not: before a call has begun it never was one, after
    that the rest up to one of `closers` is Content.

    White space is dropped between two calls, before the first and after the last one if nothing else
    stands there; white space after prose stays.
    """

    openers: ClassVar[tuple[str, ...]] = ()  # a call, or a section of calls, begins; no white space at their start
    trailers: ClassVar[tuple[str, ...]] = ()  # may follow a call, in this order, each once
    closers: ClassVar[tuple[str, ...]] = ()  # end what is left of a call that broke off
    tags: ClassVar[tuple[str, ...]] = ()  # mean nothing in what is left of a call that broke off

    def __init__(self) -> None:
        self._openers = marker_finder(self.openers)
        self._enders = marker_finder(self.closers + self.openers + self.tags)
        self._text = ""  # not read yet; `_at` is the place in it
        self._at = 0
        self._raw: list[str] = []
        self._events: list[Event] = []
        self._calls = 0  # begun so far
        self._in_call = False
        self._blank = True  # only white space since the beginning or the last call
        self._trailers: tuple[str, ...] = ()  # those that may still come
        self._scanner = JsonScanner()
        self._after_arguments: State = self._call_read
        self._state: State = self._outside
        self._plain = False  # in prose with nothing held back

    @property
    def is_plain(self) -> bool:
        return False  # a call may begin wherever it likes

    def push(self, text: str) -> Sequence[Event]:
        """Return what is certain after this further text; may be empty."""
        if self._plain and self._openers.absent(text):
            return (Content(text),) if text else ()
        self._text += text
        while self._state():
            pass
        self._text, self._at = self._text[self._at :], 0
        self._plain = not self._text and not self._blank and self._state == self._outside
        events, self._events = self._events, []
        return events

    def flush(self) -> Sequence[Event]:
        """The rest, once no text follows."""
        rest = [*self._words(), self._text]
        self._raw.clear()
        self._text = ""
        if not any(rest) or (self._calls and self._is_markup("".join(rest).strip())):
            return ()
        return [Content(text) for text in rest if text]

    def _is_markup(self, rest: str) -> bool:
        """Return whether the answer ends within what closes a call: `</tool_c` is no word of the model."""
        is_at_call = self._in_call or self._blank
        return not rest or (is_at_call and any(end.startswith(rest) for end in self.closers + self.trailers))

    # --- for a format to say -------------------------------------------------------------------------

    def _opened(self, marker: str) -> State:
        """Return the state after this opener."""
        raise NotImplementedError

    def _bare(self, char: str) -> State | None:
        """Return the state after `char` if, with only white space before it, it begins a call without a marker."""
        return None

    # --- states ---------------------------------------------------------------------------------------

    def _outside(self) -> bool:
        """Prose, or nothing yet."""
        if self._blank:
            if not self._pass_blank():
                return False
            if bare := self._bare(self._text[self._at]):
                self._state = bare
                return True
        where, marker = self._openers.find(self._text, self._at)
        if where > self._at:
            self._say(self._text[self._at : where])
            self._at = where
        if not marker:
            return False
        self._take(len(marker))
        self._state = self._opened(marker)
        return True

    def _broken_off(self) -> bool:
        """Read what remains of a call that broke off."""
        where, marker = self._enders.find(self._text, self._at)
        if where > self._at:
            self._say(self._text[self._at : where])
            self._at = where
        if not marker:
            return False
        if marker in self.openers:
            self._take(len(marker))
            self._state = self._opened(marker)
        elif marker in self.tags:
            self._at += len(marker)
        else:
            self._at += len(marker)
            self._end()
        return True

    def _arguments_ahead(self) -> bool:
        """An object of JSON follows, or a closer in its place, which means no arguments."""
        if not self._skip_space():
            return False
        if self._text[self._at] == "{":
            self._raw.clear()
            self._scanner = JsonScanner()
            self._state = self._arguments
            return True
        return self._expect(*((marker, self._no_arguments) for marker in self.closers + self.tags))

    def _no_arguments(self) -> bool:
        self._argue("{}")
        self._end()
        return True

    def _arguments(self) -> bool:
        """Within the object, which goes out as it comes in."""
        fragment, self._at = self._scanner.feed(self._text, self._at, len(self._text))
        self._argue(fragment)
        return self._scanned(self._after_arguments)

    def _call_read(self) -> bool:
        self._end()
        return True

    # --- steps ----------------------------------------------------------------------------------------

    def _begin(self, name: str, call_id: str | None = None) -> None:
        self._events.append(CallBegun(self._calls, name, call_id))
        self._calls += 1
        self._in_call = True
        self._raw.clear()

    def _argue(self, fragment: str) -> None:
        if fragment:
            self._events.append(CallArguments(self._calls - 1, fragment))

    def _end(self) -> None:
        """The call is over, as it should be."""
        self._in_call = False
        self._raw.clear()
        self._blank = True
        self._trailers = self.trailers
        self._state = self._outside

    def _give_up(self) -> None:
        """The next character does not belong to a call."""
        for text in self._words():
            self._say(text)
        self._blank = False
        self._state = self._broken_off if self._in_call else self._outside
        self._in_call = False

    def _words(self) -> list[str]:
        """Return what was read and not yet reported, without the markup of a call that broke off."""
        read, self._raw = self._raw, []
        return [text for text in read if text not in self.tags] if self._in_call else ["".join(read)]

    def _scanned(self, then: State) -> bool:
        """Go on where the scanner's value is over, give up where it broke."""
        if self._scanner.done:
            self._state = then
        elif self._scanner.broken:
            self._give_up()
        else:
            return False
        return True

    def _say(self, text: str) -> None:
        """Report as prose what was read and not yet reported, and `text`."""
        if said := "".join(self._raw) + text:
            self._events.append(Content(said))
        self._raw.clear()
        self._blank = False

    def _take(self, chars: int) -> None:
        self._raw.append(self._text[self._at : self._at + chars])
        self._at += chars

    def _skip_space(self) -> bool:
        """Skip white space; return whether anything else follows."""
        end = _run_end(_SPACE_RUN, self._text, self._at, len(self._text))
        if end > self._at:
            self._take(end - self._at)
        return self._at < len(self._text)

    def _pass_blank(self) -> bool:
        """Over white space and trailers; whether anything else follows."""
        while self._skip_space():
            trailer = next((marker for marker in self._trailers if self._starts(marker) is not False), None)
            if trailer is None:
                return True
            if self._starts(trailer) is None:
                return False
            self._at += len(trailer)
            self._raw.clear()
            self._trailers = self._trailers[self._trailers.index(trailer) + 1 :]
        return False

    def _starts(self, marker: str) -> bool | None:
        """Return whether `marker` is next; None if it is too early to say."""
        if self._text.startswith(marker, self._at):
            return True
        rest = self._text[self._at : self._at + len(marker)]
        return None if len(rest) < len(marker) and marker.startswith(rest) else False

    def _expect(self, *choices: tuple[str, State]) -> bool:
        """Continue, after white space, with the choice whose marker is next; give up if none is."""
        if not self._skip_space():
            return False
        undecided = False
        for marker, state in choices:
            match self._starts(marker):
                case True:
                    self._take(len(marker))
                    self._state = state
                    return True
                case None:
                    undecided = True
        if not undecided:
            self._give_up()
        return not undecided

    def _word(self, run: re.Pattern[str] = _NAME_RUN) -> str | None:
        """The characters of `run` that come next, None until what ends them is there; "" if none or too many."""
        end = _run_end(run, self._text, self._at, self._at + MAX_NAME_CHARS + 1)
        if end - self._at > MAX_NAME_CHARS:
            return ""
        if end == len(self._text):
            return None
        word = self._text[self._at : end]
        self._take(len(word))
        return word


def _run_end(run: re.Pattern[str], text: str, at: int, end: int) -> int:
    found = run.match(text, at, end)
    return found.end() if found else at
