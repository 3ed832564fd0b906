"""Raise the number of files, and so of connections, that this process may have open at once."""

import logging
from contextlib import suppress

log = logging.getLogger(__name__)

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

_NO_LIMIT = 1 << 62


def make_room_for_files(wanted: int) -> int:
    """Raise the soft limit to `wanted`, as far as the hard limit allows. Return how many files may be open then."""
    if resource is None:
        return _NO_LIMIT
    soft, hard = (_number(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    if soft >= wanted:
        return soft
    target = min(wanted, hard)
    with suppress(ValueError, OSError):  # a sandbox, or macOS, which accepts less than its limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _number(limit: int) -> int:
    return _NO_LIMIT if resource is None or limit == resource.RLIM_INFINITY else limit
