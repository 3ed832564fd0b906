"""Read which role an operator asks for, and decide whether a worker can take it. Pure."""

from collections.abc import Mapping

from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import Role
from kvmesh.workers.engine import Engine, EngineInfo, Turnable


def check_can_turn(engine: Engine, kind: str, info: EngineInfo, role: Role) -> None:
    """Raise InvalidRequestError if the engine cannot work in this role."""
    if not isinstance(engine, Turnable) or not info.roles:
        raise InvalidRequestError(
            f"a worker with the engine {kind} cannot change its role while it runs",
            hint="torch and mock workers can; start another worker in its place",
        )
    if role not in info.roles:
        raise InvalidRequestError(
            f"this worker cannot become {role.noun}", hint="its profile has no table for that role"
        )


def role_asked_for(arguments: Mapping[str, str]) -> Role:
    """Raises InvalidRequestError if there is none, or one that is none."""
    try:
        return Role(arguments["role"])
    except (KeyError, ValueError):
        raise InvalidRequestError(
            f"set_role needs the argument 'role', got {dict(arguments)!r:.200}",
            hint=f"one of {', '.join(role.value for role in Role)}",
        ) from None
