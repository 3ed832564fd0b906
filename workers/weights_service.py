"""The seam to a service that keeps weights for all workers of a host."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvmesh.mesh.extensions import load
from kvmesh.protocol.errors import ConfigError


class WeightsLease(Protocol):
    """Says that weights are in use until it is closed."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightsInUse:
    """Weights, and the lease to close when they are not used any more."""

    weights: Any  # ModelWeights of the torch engine; this module must not import torch
    lease: WeightsLease | None = None  # None: they are this worker's own
    image: object = None  # the memory that they lie in

    def close(self) -> None:
        if self.lease is not None:
            self.lease.close()


@dataclass(frozen=True, slots=True)
class WeightsService:
    """A service that keeps weights. An extension gives one at the seam `weights`."""

    key: Callable[[Path, str, str, bool], bytes]
    """Returns the fingerprint of weights in a folder: dtype, name of the kernels, whether they are random."""
    share: Callable[[str, Callable[[], bytes], str, Callable[[], Any]], WeightsInUse]
    """Gets the socket, the key, a label, and what loads the weights if the service has none."""
    describe: Callable[[str], str]
    """Returns in one line what the service at a socket holds. Raises MeshError."""


def weights_service() -> WeightsService:
    """Raise ConfigError if this installation has no memory service."""
    for service in load("weights"):
        found: WeightsService = service
        return found
    raise ConfigError("this installation has no memory service", hint="leave out --weights-service and --memory-gib")
