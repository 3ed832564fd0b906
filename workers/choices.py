"""The choices of a Guide, and as a regular expression for engines that know no choices. Pure."""

import re

import msgspec

from protocol.errors import InvalidRequestError

_Choices = list[str]


def choices_of(value: str) -> list[str]:
    """`value`: a JSON list of strings, none of them empty. Raises InvalidRequestError for anything else."""
    try:
        choices = msgspec.json.decode(value, type=_Choices)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InvalidRequestError(f"the choices are not a JSON list of strings: {error}", param="guide") from error
    if not choices or not all(choices):
        raise InvalidRequestError("there must be a choice, and none may be empty", param="guide")
    return choices


def choice_regex(value: str) -> str:
    """As `choices_of`, for engines whose structured output knows regular expressions."""
    return "(" + "|".join(map(re.escape, choices_of(value))) + ")"
