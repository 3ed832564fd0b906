"""Arguments of earlier calls, as chat templates want them: an object, or the text that the model wrote. Pure."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from kvmesh.protocol.messages import UNREADABLE


class ReadArguments(dict[str, Any]):
    """Holds arguments as an object, and the text they were read from: a template that writes text writes that one."""

    def __init__(self, text: str, value: Mapping[str, Any]) -> None:
        super().__init__(value)
        self.text = text


class WrittenArguments(dict[str, Any]):
    """Holds arguments of an earlier call that are no JSON object: models write such, and limits cut calls off.

    A template that writes arguments as JSON, or as they are, writes the text. A template that writes them one by one
    finds one argument, `arguments`, with the text as its value.
    """

    def __init__(self, text: str) -> None:
        super().__init__(arguments=text)
        self.text = text

    def __str__(self) -> str:
        return self.text


def arguments_of(arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of an earlier call as most templates want them: an object, not its JSON.

    Arguments that are no object are accepted, because a model may have written them so (OpenAI says that they may be
    invalid JSON).
    """
    if not arguments:
        return {}
    if isinstance(arguments, dict):
        return arguments
    try:
        return ReadArguments(arguments, msgspec.json.decode(arguments, type=dict[str, Any]))
    except UNREADABLE:
        return WrittenArguments(arguments)


def text_of(arguments: object) -> object:
    """Return the arguments as the text of a JSON object; what is no object stays as it is."""
    match arguments:
        case ReadArguments(text=text) | WrittenArguments(text=text):
            return text
        case Mapping():
            return json.dumps(arguments, ensure_ascii=False)
    return arguments
