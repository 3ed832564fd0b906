"""Objects that extensions make at the start, and that endpoints and other extensions find by their type."""

from typing import TypeVar, cast

T = TypeVar("T")


class SharedParts:
    """Holds at most one object of each type."""

    __slots__ = ("_by_type",)

    def __init__(self, *parts: object) -> None:
        self._by_type = {type(part): part for part in parts}

    def add(self, part: object) -> None:
        self._by_type[type(part)] = part

    def find(self, kind: type[T]) -> T | None:
        """Return the object of exactly this type, None if no extension has made one."""
        return cast(T | None, self._by_type.get(kind))
