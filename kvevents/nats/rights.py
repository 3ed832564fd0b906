"""Say what each user of a NATS server may do with KV events, in the language of nats-server's configuration. Pure.

A worker's user publishes under its own subjects and reads nothing. A router's user reads and publishes nothing. Each
hears answers to its own requests alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvmesh.kvevents.nats.access import NatsAccess, token
from kvmesh.kvevents.nats.jetstream import STREAM, SUBJECTS

NatsRole = Literal["worker", "router"]
_API = "$JS.API"
_MAKE_STREAM = (f"{_API}.STREAM.CREATE.{STREAM}", f"{_API}.STREAM.INFO.{STREAM}")
_READ = (
    f"{_API}.STREAM.MSG.GET.{STREAM}",
    *(f"{_API}.CONSUMER.{what}.{STREAM}.>" for what in ("CREATE", "INFO", "DELETE", "MSG.NEXT", "DURABLE.CREATE")),
    f"{_API}.CONSUMER.CREATE.{STREAM}",
    f"$JS.ACK.{STREAM}.>",
)


@dataclass(frozen=True, slots=True)
class NatsUser:
    name: str
    role: NatsRole
    password: str  # as the configuration has it: "$NAME" is a variable of the server's environment


def publishes(user: NatsUser) -> Sequence[str]:
    """Return the subjects that a user may publish to; requests are published too."""
    if user.role == "worker":
        return (f"{SUBJECTS}.{token(user.name)}.>", *_MAKE_STREAM)
    return (*_MAKE_STREAM, *_READ)


def authorization(users: Iterable[NatsUser]) -> str:
    """Return the block `authorization` of a server's configuration. Everybody else is let in nowhere."""
    lines = ["authorization {", "  users = ["]
    for user in users:
        inbox = NatsAccess("", user.name).inbox
        lines += [
            f"    {{ user: {_quoted(user.name)}, password: {user.password}, permissions: {{",
            "      publish: { allow: [",
            *(f"        {_quoted(subject)}," for subject in publishes(user)),
            "      ] }",
            f"      subscribe: {{ allow: [{_quoted(f'{inbox}.>')}] }}",
            "    } },",
        ]
    return "\n".join([*lines, "  ]", "}", ""])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
