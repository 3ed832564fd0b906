"""Run work in a process of its own, which ends with the process that wants the result, however that one ends.

A pool of `concurrent.futures` waits for its work before it ends, and leaves its process behind when it is killed.
"""

import asyncio
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from kvmesh.mesh.lifecycle import die_with
from kvmesh.protocol.errors import EngineError

T = TypeVar("T")

Work = tuple[Callable[..., Any], tuple[Any, ...]]
_CONTEXT = get_context("spawn")


def run_apart(function: Callable[..., T], *arguments: object) -> T:
    """Return the result of a function that runs in a process of its own. Raise what the function raised."""
    with _working((function, arguments)) as results:
        return _result(results, function)


async def apart(function: Callable[..., T], *arguments: object) -> T:
    """Return the result of a function that runs in a process of its own. To cancel this kills that process."""
    loop = asyncio.get_running_loop()
    with _working((function, arguments)) as results:
        readable = asyncio.Event()
        loop.add_reader(results.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(results.fileno())
        return _result(results, function)


@contextmanager
def _working(work: Work) -> Iterator[Connection]:
    """Start the process; yield where its result comes. The process is killed at the end of the block."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_work, args=(theirs, os.getpid(), work), name="work apart", daemon=True)
    try:
        process.start()
        theirs.close()
        yield ours
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        ours.close()


def _work(results: Connection, parent: int, work: Work) -> None:
    die_with(parent)
    function, arguments = work
    try:
        outcome = True, function(*arguments)
    except Exception as error:
        error.add_note(traceback.format_exc())  # the caller's traceback ends at the pipe
        outcome = False, error
    results.send(outcome)


def _result(results: Connection, function: Callable[..., T]) -> T:
    try:
        is_done, found = results.recv()
    except EOFError:
        raise EngineError(
            f"the process of {function.__name__} has ended without a result", hint="was it killed for its memory?"
        ) from None
    if not is_done:
        raise found
    value: T = found
    return value
