"""The connector seam: a decision becomes workers. Each kind passes tests/contracts/test_planner_connectors.py."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.model import RoleFleet, ScalingDecision
from kvmesh.protocol.errors import ConfigError, MeshError


class ConnectorError(MeshError):
    """The connector's other side cannot be reached, or has refused. What was done is not known: ask, then try again."""

    code = "connector"


class Fleets(Struct, frozen=True, kw_only=True):
    """All workers that the connector answers for."""

    prefill: RoleFleet
    decode: RoleFleet


Present = Callable[[], Fleets]
"""Returns the workers that have a card in discovery."""


class Applied(Struct, frozen=True, kw_only=True):
    """The state of a decision that is being carried out."""

    prefill: int  # ordered now, as RoleFleet.ordered counts
    decode: int
    flipped: int = 0  # workers that were asked to change their role
    is_complete: bool = True  # if false, the decision has to be applied again later
    notes: tuple[str, ...] = ()  # each says what was not done as asked, and why


class Connector(Protocol):
    name: str

    async def fleets(self) -> Fleets:
        """Return the workers that exist now. Raise ConnectorError if that is not known."""

    async def apply(self, decision: ScalingDecision) -> Applied:
        """Order what the decision says. More workers are ordered at once; no worker that is starting is taken away.

        There are never fewer workers than asked for, and a second call with the same decision changes nothing. A flip
        that cannot be done is reported in the notes, and the counts are reached without it.
        Raise ConnectorError if the order fails; a part of it may then have been done.
        """

    async def close(self) -> None:
        """Release resources and leave the workers as they are. A second call does nothing."""


@dataclass(frozen=True, slots=True)
class ConnectorKind:
    """A way to open a connector. `can_flip`: the connector can turn a worker of one role into one of the other."""

    name: str  # the value of --connector
    open: Callable[[ServiceConfig, Present], Awaitable[Connector]]
    can_flip: bool


def check_distinct(connector: str, prefill: str, decode: str) -> None:
    """Raise ConfigError if both roles are the same service or workload. `connector`: its name, in flags."""
    if prefill == decode:
        raise ConfigError(
            f"prefill and decode workers are both {prefill!r}",
            hint=f"set --{connector}-prefill and --{connector}-decode",
        )
