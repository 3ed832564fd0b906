"""Check how a SGLang server was started: prefill and decode servers meet by a bootstrap, both are asked at once.

Their requests carry bootstrap_host, bootstrap_port and bootstrap_room in /v1/completions; the prefill server answers
once its KV was fetched. The tickets are those of workers that hold SGLang themselves.
"""

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from kvmesh.workers.engines.attached.server import Disaggregation
from kvmesh.workers.engines.sglang.bootstrap import backend_name

START_HINT = "start it with --disaggregation-mode {role}, or attach it without --role"


def bootstrap_transfer(role: Role, told: Disaggregation | None) -> str:
    """Return the KV transfer for the worker's card: "" for a server that does both halves.

    Raise ConfigError for a server that was started in another role.
    """
    mode = "null" if told is None else told.mode
    if role is Role.AGGREGATED:
        if mode != "null":
            raise ConfigError(f"this SGLang server runs as {mode}", hint=f"attach it with --role {mode}")
        return ""
    if mode != role.value:
        found = "does not say that it can" if mode == "null" else f"runs as {mode}"
        raise ConfigError(f"--role {role.value}, and the server {found}", hint=START_HINT.format(role=role.value))
    assert told is not None
    return backend_name(told.transfer)
