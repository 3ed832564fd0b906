"""Stub of the names that SGLang imports for notebooks."""

from typing import Any


class HTML:
    def __init__(self, *_: Any) -> None: ...


def display(*_: Any) -> None: ...
