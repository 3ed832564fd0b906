"""Register the memory service as what keeps weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvmesh.workers.memory.client import read_holdings
from kvmesh.workers.weights_service import WeightsInUse, WeightsService


def key(folder: Path, dtype: str, kernels_name: str, random_weights: bool) -> bytes:
    from kvmesh.workers.memory.torch_weights import weights_key  # needs torch, so imported here

    return weights_key(folder, dtype, kernels_name, random_weights)


def share(socket_path: str, key_of: Callable[[], bytes], label: str, load: Callable[[], Any]) -> WeightsInUse:
    from kvmesh.workers.memory.torch_weights import share_weights

    return share_weights(socket_path, key_of, label, load)


def describe(socket_path: str) -> str:
    """Raise MeshError if no service answers."""
    holdings = read_holdings(socket_path)
    used = sum(image.num_bytes for image in holdings.images)
    return f"{len(holdings.images)} images, {used >> 20} of {holdings.limit_bytes >> 20} MiB, process {holdings.pid}"


EXTENSION = WeightsService(key, share, describe)
