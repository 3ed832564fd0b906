"""A choice among strings, for engines whose structured output knows regular expressions but no choices. Pure."""

import json
import re

from protocol.errors import InvalidRequestError


def choice_regex(value: str) -> str:
    """`value`: a JSON list of strings, as in a Guide. Raises InvalidRequestError for anything else."""
    try:
        choices = json.loads(value)
    except ValueError as error:
        raise InvalidRequestError(f"the choices are not JSON: {error}", param="guide") from error
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequestError("the choices are not a list of strings", param="guide")
    return "(" + "|".join(map(re.escape, choices)) + ")"
