"""Requests of the simulator. They have no text: a full KV block has a name, and caches know only that name.

Equal names at equal places of two prompts, after equal blocks, are a prefix that they share.
"""

from array import array

from msgspec import Struct

_ANSWER = 1 << 63
_BLOCKS_BITS = 20  # a sequence has fewer blocks than this many bits can count


class SimRequest(Struct, frozen=True, gc=False):
    """Describe a request. `names`: u64 [isl_tokens // block_size], packed, one for each full block of the prompt.

    `thread`: u43; what follows the prompt is named after it, as `thread_names` does: the next turn of a conversation
    finds the answer in the cache if it names its blocks so.
    """

    arrival_s: float
    isl_tokens: int
    osl_tokens: int
    names: bytes
    thread: int
    tenant: str = ""


def thread_name(thread: int, number: int) -> int:
    """Return the name of block `number` of a text that no other request shares."""
    return _ANSWER | thread << _BLOCKS_BITS | number


def thread_names(thread: int, first: int, end: int) -> bytes:
    """Return the names of the blocks first..end-1, packed."""
    return array("Q", range(thread_name(thread, first), thread_name(thread, end))).tobytes()
