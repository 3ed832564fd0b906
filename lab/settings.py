"""Settings that the programs of the laboratory have in common."""

from typing import Annotated

from msgspec import Meta, Struct


class LabConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of each program's settings."""

    json: Annotated[bool, Meta(description="print the result as JSON, in the last line; progress goes to stderr")] = (
        False
    )
