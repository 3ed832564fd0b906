"""Find out which conversations with calls of tools a chat template accepts, and give it these. Pure.

Templates disagree: some concatenate the content of a turn of calls alone, some test whether it is null; some write
arguments as they are given; some accept one call per turn, or ids of nine characters. Small conversations are rendered
once, when the template is loaded, and the way of writing them that shows the call is used for all requests.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType

from kvmesh.frontend.arguments import text_of
from kvmesh.frontend.parsers.ids import SHORT_ID_CHARS

ChatMessage = Mapping[str, Any]
Render = Callable[[Sequence[dict[str, Any]], Sequence[Mapping[str, Any]]], str]  # fails if the template refuses

_SHORT_ID = re.compile(rf"[A-Za-z0-9]{{{SHORT_ID_CHARS}}}")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_KEY, _VALUES = "probe_key", ("probe_value_1", "probe_value_2")
_NAME = "probe_tool"
_NULLS = ("None", "null")
_SHORT_IDS, _LONG_IDS = ("probe0001", "probe0002"), ("call_0123456789abcdef", "call_123456789abcdef0")
_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "A tool",
            "parameters": {
                "type": "object",
                "properties": {_KEY: {"type": "string", "description": "A text"}},
                "required": [_KEY],
            },
        },
    },
)


class TemplateTraits(NamedTuple):
    """Says how a template wants conversations with calls. The defaults are what most templates accept."""

    null_content: str | UnsetType | None = UNSET  # of a turn of calls alone; UNSET: without the key
    takes_text: bool = False  # arguments as text, not as an object
    short_ids: bool = False  # nine letters and digits
    one_call: bool = False  # in a turn


class _Trial(NamedTuple):
    """The way in which a probe is written."""

    content: str | UnsetType | None
    takes_text: bool


_TRIALS = tuple(_Trial(content, as_text) for as_text in (False, True) for content in (UNSET, None, ""))


def probe_template(render: Render) -> TemplateTraits:
    """Return the traits of a template. The first way that shows the call counts, else the first that renders."""
    rendered: dict[_Trial, str] = {}
    for trial in _TRIALS:
        if (text := _rendered(render, _turns(trial, _SHORT_IDS[:1]))) is None:
            continue
        rendered[trial] = text
        if _shows_call(trial, text) and not _prints_null(render, trial, text):
            return _traits(render, trial)
    plain = [trial for trial, text in rendered.items() if not _prints_null(render, trial, text)]
    return TemplateTraits(plain[0].content, plain[0].takes_text) if plain else TemplateTraits()


def _traits(render: Render, trial: _Trial) -> TemplateTraits:
    """Return the traits of a template that shows one call if it is written as in the trial."""
    short_ids = _rendered(render, _turns(trial, _LONG_IDS[:1])) is None
    two = _turns(trial, _SHORT_IDS)
    one_call = not _shows_both(_rendered(render, two))
    if one_call:
        turns = [_with_content(turn, trial.content) for turn in one_call_a_turn(two)]
        one_call = _shows_both(_rendered(render, turns))
    return TemplateTraits(trial.content, trial.takes_text, short_ids, one_call)


def _shows_both(text: str | None) -> bool:
    return text is not None and all(value in text for value in _VALUES)


def _rendered(render: Render, turns: Sequence[dict[str, Any]]) -> str | None:
    try:
        return render(turns, _TOOLS)
    except Exception:  # a template is a program: it may fail in any way
        return None


def _turns(trial: _Trial, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return a conversation in which the model has called a tool once for each id, and has the results."""
    calls = []
    for call_id, value in zip(ids, _VALUES, strict=False):
        given = {_KEY: value}
        arguments = text_of(given) if trial.takes_text else given
        calls.append({"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}})
    called = _with_content({"role": "assistant", "tool_calls": calls}, trial.content)
    results = [{"role": "tool", "content": "1", "tool_call_id": call_id, "name": _NAME} for call_id in ids]
    return [{"role": "user", "content": "Hi"}, called, *results]


def _with_content(turn: ChatMessage, content: str | UnsetType | None) -> dict[str, Any]:
    lacks = content is not UNSET and turn["role"] == "assistant" and "content" not in turn
    return {**turn, "content": content} if lacks else dict(turn)


def _shows_call(trial: _Trial, text: str) -> bool:
    """Return whether the call stands there with its arguments, neither as Python writes an object nor quoted twice."""
    if _VALUES[0] not in text or f"'{_KEY}': '{_VALUES[0]}'" in text:
        return False
    return not (trial.takes_text and f'{_VALUES[0]}\\"' in text)


def _prints_null(render: Render, trial: _Trial, text: str) -> bool:
    """Return whether the template writes a word for null where the content should be: Python's, or JSON's."""
    if trial.content is not None or not any(word in text for word in _NULLS):
        return False
    without = _rendered(render, _turns(_Trial("", trial.takes_text), _SHORT_IDS[:1]))
    return without is not None and any(text.count(word) > without.count(word) for word in _NULLS)


# --- conversations for such a template ----------------------------------------------------------------


def fitted(messages: Sequence[ChatMessage], traits: TemplateTraits) -> Sequence[ChatMessage]:
    """Return the messages as the template accepts them, except for contents that are null."""
    if traits.one_call:
        messages = one_call_a_turn(messages)
    if traits.takes_text or traits.short_ids:
        short = _short_ids(messages) if traits.short_ids else {}
        messages = [_fitted(message, short, takes_text=traits.takes_text) for message in messages]
    return messages


def _fitted(message: ChatMessage, short: Mapping[str, str], *, takes_text: bool) -> ChatMessage:
    changed: dict[str, Any] = {}
    call_id = message.get("tool_call_id")
    if call_id is not None and call_id in short:
        changed["tool_call_id"] = short[call_id]
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [_fitted_call(call, short, takes_text=takes_text) for call in calls]
    return {**message, **changed} if changed else message


def _fitted_call(call: Mapping[str, Any], short: Mapping[str, str], *, takes_text: bool) -> dict[str, Any]:
    function = call["function"]
    if takes_text:
        function = {**function, "arguments": text_of(function["arguments"])}
    return {**call, "id": short.get(call["id"], call["id"]), "function": function}


def _short_ids(messages: Sequence[ChatMessage]) -> dict[str, str]:
    """Return a short id for each id of the conversation, one to one. It depends on the id alone, unless two collide:
    so the prompt of the next turn begins as this one."""
    ids = dict.fromkeys(_ids(messages))
    short = {call_id: call_id for call_id in ids if _SHORT_ID.fullmatch(call_id)}
    taken = set(short)
    for call_id in ids:
        if call_id not in short:
            tries = (short_id(f"{call_id}{'#' * n}") for n in range(len(ids)))
            short[call_id] = next(found for found in tries if found not in taken)
            taken.add(short[call_id])
    return short


def _ids(messages: Iterable[ChatMessage]) -> Iterable[str]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            if call["id"] is not None:
                yield call["id"]
        if (call_id := message.get("tool_call_id")) is not None:
            yield call_id


def short_id(text: str) -> str:
    """Return nine letters and digits that stand for a text."""
    number = int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest())
    signs = []
    for _ in range(SHORT_ID_CHARS):
        number, digit = divmod(number, len(_DIGITS))
        signs.append(_DIGITS[digit])
    return "".join(signs)


def one_call_a_turn(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with each turn of several calls split: each call is followed by its result."""
    split: list[ChatMessage] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        first = at
        while at < len(messages) and messages[at]["role"] == "tool":
            at += 1
        split += _split(message, calls, list(messages[first:at]))
    return split


def _split(message: ChatMessage, calls: Sequence[Mapping[str, Any]], results: list[ChatMessage]) -> list[ChatMessage]:
    """Return one turn for each call, with its result: the one with its id, else the first that has no call's id."""
    ids = {call.get("id") for call in calls}
    by_id = {result.get("tool_call_id"): result for result in reversed(results)}
    others = [result for result in results if result.get("tool_call_id") not in ids]
    split: list[ChatMessage] = []
    for n, call in enumerate(calls):
        turn = {**message, "tool_calls": [call]}
        if n > 0:
            turn = {"role": message["role"], "tool_calls": [call]}
        split.append(turn)
        result = by_id.get(call.get("id")) or (others.pop(0) if others else None)
        if result is not None:
            split.append(result)
    placed = {id(turn) for turn in split}
    return split + [result for result in results if id(result) not in placed]
