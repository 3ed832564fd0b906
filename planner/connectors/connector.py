"""The connector seam: how a decision becomes workers. Each kind passes tests/contracts/test_planner_connectors.py."""

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from planner.model import RoleFleet, ScalingDecision
from protocol.errors import ConfigError, MeshError


class ConnectorError(MeshError):
    """What makes the workers cannot be reached, or has refused. Nothing is known of what was done: ask, try again."""

    code = "connector"


class Fleets(Struct, frozen=True, kw_only=True):
    """All workers that the connector answers for."""

    prefill: RoleFleet
    decode: RoleFleet


Present = Callable[[], Fleets]
"""Returns the workers that have a card in discovery."""


class Applied(Struct, frozen=True, kw_only=True):
    """What has become of a decision so far."""

    prefill: int  # ordered now, as RoleFleet.ordered counts
    decode: int
    flipped: int = 0  # workers that have been told to change their role
    is_complete: bool = True  # else it is to be applied again later
    notes: tuple[str, ...] = ()  # what was not done as it was asked, and why


class Connector(Protocol):
    name: str

    async def fleets(self) -> Fleets:
        """What is there now. Raises ConnectorError if nobody can tell."""

    async def apply(self, decision: ScalingDecision) -> Applied:
        """Order what the decision says: more at once, fewer only as far as no worker that starts is taken away.

        Never fewer than asked, and a second call with the same decision changes nothing more. A flip that cannot be
        done is told in the notes, with the name of who refused; the counts are then reached without it.
        Raises ConnectorError; a part may then have been done.
        """

    async def close(self) -> None:
        """The workers stay as they are. A second call does nothing."""


def check_distinct(connector: str, prefill: str, decode: str) -> None:
    """Raise ConfigError if both roles are the same service or workload. `connector`: its name, in flags."""
    if prefill == decode:
        raise ConfigError(
            f"prefill and decode workers are both {prefill!r}",
            hint=f"set --{connector}-prefill and --{connector}-decode",
        )
