"""The messages between a process and its killable children."""

import msgspec

MAX_FRAME_BYTES = 16 << 20
HEADER_BYTES = 4
FORK, KILL = b"fork", b"kill"  # commands to the zygote; FORK carries a socket, KILL a process id


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """The first message to a zygote: what its children do, and how much they may use."""

    target: str  # "module:function"; the function gets `argument` and returns what makes a handler
    argument: bytes
    memory_bytes: int  # that a child may map beyond what the zygote has
    stack_bytes: int  # of the thread that handles the jobs, not part of memory_bytes


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The zygote is prepared and forks from now on."""


class Broken(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The zygote could not be prepared and has ended."""

    reason: str


class Forked(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A child has begun. Answers to FORK arrive in the order of the commands."""

    pid: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A child has ended."""

    pid: int
    status: int  # as os.waitstatus_to_exitcode returns it: negative for a signal


Report = Ready | Broken | Forked | Ended
report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def framed(body: bytes) -> bytes:
    """Return the body with its length in front."""
    return len(body).to_bytes(HEADER_BYTES, "little") + body
