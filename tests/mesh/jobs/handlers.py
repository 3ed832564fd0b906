"""Jobs for killable children in tests: they answer, spin, eat memory or end."""

import ctypes
import os
import time
from collections.abc import Callable


def prepare(argument: bytes) -> Callable[[], Callable[[bytes], bytes]]:
    if argument == b"broken":
        raise ValueError("cannot be prepared")
    return lambda: lambda job: handle(argument, job)


def handle(argument: bytes, job: bytes) -> bytes:
    match job.split():
        case [b"echo", *words]:
            return argument + b" ".join(words)
        case [b"pid"]:
            return str(os.getppid()).encode()
        case [b"burn", seconds]:
            until = time.process_time() + float(seconds)
            while time.process_time() < until:
                pass
            return b"burnt"
        case [b"spin"]:
            while True:
                pass
        case [b"eat"]:
            return bytes(1 << 40)
        case [b"abort"]:
            ctypes.CDLL(None).abort()
        case [b"exit"]:
            os._exit(3)
    raise AssertionError(job)
