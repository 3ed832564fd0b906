"""Keep control tokens to the chat template: text that spells one stays text. Pure.

A tokenizer makes a token of `<|im_start|>` wherever it finds the spelling. So a mark is put into each spelling that a
message holds, before the chat is rendered. The rendered chat is cut at the marks, and its parts are tokenized one by
one: no part holds a whole spelling.

A mark stands behind the last letter or digit of a spelling. The pre-tokenizers of byte-level encodings split there in
any text, so that the parts have the tokens that the whole text has without control tokens.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvmesh.frontend.arguments import WrittenArguments
from kvmesh.frontend.parsers.reasoning import REASONING_PARSERS
from kvmesh.frontend.parsers.tools import TOOL_PARSERS
from kvmesh.frontend.template_probes import ChatMessage
from kvmesh.frontend.tokenizer import Tokenizer
from kvmesh.frontend.tokenizing.cuts import any_of
from kvmesh.protocol.errors import InvalidRequestError

# Tokens around thoughts and calls, of every model whose answers are known
ANSWER_MARKERS = frozenset(
    [marker for thoughts in REASONING_PARSERS.values() for marker in thoughts.markers]
    + [marker for calls in TOOL_PARSERS.values() for marker in calls.markers]
)
ASCII = "".join(map(chr, range(0x21, 0x7F)))
FIRST_PRIVATE, LAST_PRIVATE = 0xE001, 0xF8FF
_ESCAPED_PRIVATE = re.compile(r"\\u(e[0-9a-f]{3}|f[0-8][0-9a-f]{2})", re.IGNORECASE)
_LAST_SIGNS = re.compile(r"(?<=[^\W_])[\W_]+\Z")
_BAR = re.compile("[|｜]")  # stands in nearly all control tokens, and in no word


class Chat(NamedTuple):
    """Holds what a request gives to the chat template."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] | None
    options: Mapping[str, Any]


class Spellings:
    """Finds control tokens in a text."""

    def __init__(self, tokens: Iterable[str], normalize: Callable[[str], str] | None = None) -> None:
        """`normalize` is the tokenizer's normalizer, if it looks for some of the tokens in normalized text."""
        tokens = sorted(tokens, key=len)
        self._first_chars = tuple(sorted({token[0] for token in tokens}))
        self._token = any_of(tokens) if tokens else None  # of two at one place, the shorter one
        self._beginnings = frozenset(token[:size] for token in tokens for size in range(1, len(token)))
        self._longest_beginning = max(map(len, self._beginnings), default=0)
        self._normalize = normalize
        self._keeps_ascii = normalize is not None and normalize(ASCII).endswith(ASCII)
        firsts = re.escape("".join(self._first_chars))
        is_plain = normalize is None and not any(char in token for token in tokens for char in '"\\')
        self._end_in_json = re.compile(f'([{firsts}][^"{firsts}]*)"') if tokens and is_plain else None

    def are_in(self, text: str) -> bool:
        """Return whether the text holds a token, or ends with what may become one with the text behind it."""
        for char in self._first_chars:
            if char in text:
                return self._are_in(text)
        if self._normalize is None or (self._keeps_ascii and text.isascii()):
            return False
        return self._in_normalized(text)

    def are_in_any(self, value: object) -> bool:
        """Return whether a text anywhere in a value, which may be nested, holds a token."""
        if isinstance(value, str):
            return self.are_in(value)
        return self._may_be_in_json(value) and any(map(self.are_in, texts_in(value)))

    def _may_be_in_json(self, value: object) -> bool:
        """Return False if no text of the value holds a token: one search instead of one for each text."""
        if self._token is None or self._end_in_json is None:
            return True
        text = msgspec.json.encode(value).decode()
        if not any(char in text for char in self._first_chars):
            return False
        if self._token.search(text) is not None:
            return True
        return any(end in self._beginnings for end in self._end_in_json.findall(text))

    def marked(self, text: str, mark: str) -> str:
        """Return the text with a mark in each token."""
        if not self.are_in(text):
            return text
        parts, start = [], 0
        for place in self._places(text):
            parts.append(text[start:place])
            start = place
        parts.append(text[start:])
        if any(map(self._in_normalized, parts)):
            parts = list(text)
        return mark.join(parts)

    def _are_in(self, text: str) -> bool:
        if self._token is None:
            return False
        return self._token.search(text) is not None or self._begins_at_end(text) or self._in_normalized(text)

    def _begins_at_end(self, text: str) -> bool:
        tail = text[-self._longest_beginning :]
        if not any(char in tail for char in self._first_chars):
            return False
        return any(tail[start:] in self._beginnings for start in range(len(tail)))

    def _in_normalized(self, text: str) -> bool:
        if self._token is None or self._normalize is None:
            return False
        return self._token.search(self._normalize(text)) is not None

    def _places(self, text: str) -> list[int]:
        """Return where the marks go. Tokens may overlap: each is looked for, wherever it starts."""
        assert self._token is not None
        places, start = set(), 0
        while (found := self._token.search(text, start)) is not None:
            places.add(found.start() + cut_of(found[0]))
            start = found.start() + 1
        if self._begins_at_end(text):
            places.add(len(text))
        return sorted(places)


class ControlTokens:
    """Knows which tokens belong to the chat template of a model."""

    def __init__(
        self, tokens: Iterable[str], answered: Iterable[str] = (), normalize: Callable[[str], str] | None = None
    ) -> None:
        """`answered`: those that an answer of the model shows, as `<think>`. In the text of an earlier answer they stay
        control tokens."""
        self.tokens = frozenset(tokens)
        self._any = Spellings(self.tokens, normalize)
        self._of_turns = Spellings(self.tokens.difference(answered), normalize)

    def are_in(self, chat: Chat) -> bool:
        """Return whether a text of the chat spells a control token that belongs to the template."""
        for message in chat.messages:
            said = self._of_turns if message["role"] == "assistant" else self._any
            for key, value in message.items():
                if value is None or key == "role":
                    continue
                if (said if key == "content" else self._any).are_in_any(value):
                    return True
        if chat.tools and self._any.are_in_any(chat.tools):
            return True
        return bool(chat.options) and self._any.are_in_any(chat.options)

    def marked(self, chat: Chat, mark: str) -> Chat:
        """Return the chat with a mark within each control token that its texts spell."""

        def anywhere(value: Any) -> Any:
            return with_texts(value, lambda text: self._any.marked(text, mark))

        def in_message(message: ChatMessage) -> ChatMessage:
            changed = {key: value if key in ("role", "content") else anywhere(value) for key, value in message.items()}
            said = self._of_turns if message["role"] == "assistant" else self._any
            return changed | {"content": with_texts(message.get("content"), lambda text: said.marked(text, mark))}

        tools = None if chat.tools is None else [anywhere(tool) for tool in chat.tools]
        return Chat([in_message(message) for message in chat.messages], tools, anywhere(chat.options))


def control_tokens(tokenizer: Tokenizer, template_source: str) -> ControlTokens:
    """Return the control tokens of a model: special tokens, and added tokens that its template writes.

    Other added tokens may be ordinary text: runs of spaces, HTML tags, words.
    """
    special = tokenizer.special_tokens
    added = tokenizer.added_tokens - special
    others = {token for token in added if _BAR.search(token) or token in ANSWER_MARKERS or token in template_source}
    # An answer shows these. The others belong to turns, whatever the tokenizer.json calls them (DeepSeek's <｜User｜>).
    answered = {token for token in others if token in ANSWER_MARKERS or not _BAR.search(token)}
    tokens = {token for token in special | others if len(token) > 1 and token.strip()}
    return ControlTokens(tokens, answered, tokenizer.normalizer_for(tokens))


def cut_of(token: str) -> int:
    """Return the place of the mark within the spelling of a token."""
    signs = _LAST_SIGNS.search(token)
    return signs.start() if signs is not None else 1


def texts_in(value: object) -> Iterator[str]:
    """Yield each text of a value, names in objects included."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str(text):
                yield text
            case Mapping() as fields:
                waiting += [*fields, *fields.values()]
            case list() | tuple() as items:
                waiting += items


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with each text changed, names in objects included."""
    match value:
        case str():
            return change(value)
        case WrittenArguments():
            return WrittenArguments(change(value.text))
        case Mapping():
            return {change(name): with_texts(inner, change) for name, inner in value.items()}
        case list() | tuple():
            return [with_texts(inner, change) for inner in value]
    return value


def unused_mark(chat: Chat, source: str) -> str:
    """Return a character that neither the chat nor the template holds, not even escaped in JSON.

    Raise InvalidRequestError if there is none.
    """
    used: set[str] = set()
    for text in (source, *texts_in(chat)):
        used.update(text)
        if "\\" in text:
            used.update([chr(int(digits, 16)) for digits in _ESCAPED_PRIVATE.findall(text)])
    for code in range(FIRST_PRIVATE, LAST_PRIVATE + 1):
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequestError("the messages hold every character for private use", param="messages")


def parts_of(text: str, mark: str) -> list[str]:
    """Return a rendered text, cut at the marks. There may be none, and some may stand in JSON without other characters
    than ASCII."""
    text = text.replace(f"\\u{ord(mark):04x}", mark)
    return [part for part in text.split(mark) if part] or [""]
