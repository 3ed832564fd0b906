"""Traces as requests of the simulator, read as time goes by."""

import heapq
import random
from array import array
from collections.abc import Iterable, Iterator

import msgspec

from protocol.errors import ConfigError
from simulator.requests import SimRequest, thread_names
from simulator.trace_files import TraceRow


def from_rows(rows: Iterable[TraceRow], block_size: int, trace_block_size: int = 512) -> Iterator[SimRequest]:
    """`rows` in order of time. Their block ids stand for `trace_block_size` tokens each.

    Blocks that a row has no id for, and its answer, are shared with nobody. Raises ConfigError if the sizes do not fit.
    """
    if trace_block_size % block_size:
        found = f"blocks of {block_size} tokens do not fit into the trace's blocks of {trace_block_size}"
        raise ConfigError(found, hint="set --block-size to a divisor of --trace-block-size")
    parts = trace_block_size // block_size
    for thread, row in enumerate(rows):
        num_blocks = row.input_length // block_size
        if parts == 1:
            named = row.hash_ids[:num_blocks]
        else:
            ids = row.hash_ids[: -(-num_blocks // parts)]
            named = [i * parts + part for i in ids for part in range(parts)][:num_blocks]
        names = array("Q", named).tobytes()
        if len(named) < num_blocks:
            names += thread_names(thread, len(named), num_blocks)
        yield SimRequest(
            arrival_s=row.timestamp / 1e3,
            isl_tokens=row.input_length,
            osl_tokens=max(1, row.output_length),
            names=names,
            thread=thread,
        )


def jittered(requests: Iterable[SimRequest], jitter_s: float, seed: int) -> Iterator[SimRequest]:
    """Arrivals moved by up to `jitter_s`, in order again. Holds what lies within that time of each other."""
    rng = random.Random(seed)
    pending: list[tuple[float, int, SimRequest]] = []
    for number, request in enumerate(requests):
        moved = request.arrival_s + rng.random() * jitter_s
        while pending and pending[0][0] <= request.arrival_s:
            yield heapq.heappop(pending)[2]
        heapq.heappush(pending, (moved, number, msgspec.structs.replace(request, arrival_s=moved)))
    while pending:
        yield heapq.heappop(pending)[2]
