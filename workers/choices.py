"""The choices of a Guide, and as a regular expression for engines that know no choices. Pure."""

import re

import msgspec

from kvmesh.protocol.errors import InvalidRequestError

_Choices = list[str]


def choices_of(value: str) -> list[str]:
    """Return the choices in `value`, a JSON list of strings.

    Raise InvalidRequestError for anything else, and for an empty choice.
    """
    try:
        choices = msgspec.json.decode(value, type=_Choices)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InvalidRequestError(f"the choices are not a JSON list of strings: {error}", param="guide") from error
    if not choices or not all(choices):
        raise InvalidRequestError("there must be a choice, and none may be empty", param="guide")
    return choices


def choice_regex(value: str) -> str:
    """Return the choices as a regular expression, for engines whose structured output knows those. Raise as
    `choices_of`.
    """
    return "(" + "|".join(map(re.escape, choices_of(value))) + ")"
