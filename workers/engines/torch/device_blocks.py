"""Copy KV blocks between a GPU and host memory beside the steps: a stream of its own for each thread that copies.

A block that is read was complete before the copy was planned, because a step ends with the GPU at rest. A block that is
written belongs to no step before the copy has ended. So no copy waits for a step, and no step for a copy.
"""

import threading

import numpy as np
import torch
from torch import Tensor

from kvmesh.kvcache.tiers.store import Payload


class CudaBlocks:
    """The blocks of a KV cache on a GPU."""

    def __init__(self, blocks: Tensor) -> None:
        """Take the cache: [num_blocks, ...], contiguous."""
        self._bytes = blocks.view(blocks.shape[0], -1).view(torch.uint8)
        self._own = threading.local()

    def read(self, block_id: int, into: Payload) -> None:
        stream, staging = self._stream_and_staging()
        with torch.cuda.stream(stream):
            staging.copy_(self._bytes[block_id], non_blocking=True)
        stream.synchronize()
        np.copyto(into, staging.numpy())

    def write(self, block_id: int, payload: Payload) -> None:
        stream, staging = self._stream_and_staging()
        np.copyto(staging.numpy(), payload)
        with torch.cuda.stream(stream):
            self._bytes[block_id].copy_(staging, non_blocking=True)
        stream.synchronize()

    def _stream_and_staging(self) -> tuple["torch.cuda.Stream", Tensor]:
        """Return the stream of this thread and its pinned memory, of one block."""
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._bytes.device)  # type: ignore[no-untyped-call]
            self._own.staging = torch.empty(self._bytes.shape[1], dtype=torch.uint8, pin_memory=True)
        return self._own.stream, self._own.staging
