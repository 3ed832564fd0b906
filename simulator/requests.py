"""What the simulator is asked: requests without text. A full KV block has a name, which is all that caches know of it.

Equal names at equal places of two prompts, after equal blocks, are a prefix that they share.
"""

from array import array

from msgspec import Struct

_ANSWER = 1 << 63
_BLOCKS_BITS = 20  # a sequence has fewer blocks than this many bits can count


class SimRequest(Struct, frozen=True, gc=False):
    """`names`: u64 [isl_tokens // block_size], one for each full block of the prompt, packed.

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
    """Of the block at place `number` of a text that is nobody else's."""
    return _ANSWER | thread << _BLOCKS_BITS | number


def thread_names(thread: int, first: int, end: int) -> bytes:
    """Of the blocks at places first..end-1, packed."""
    return array("Q", range(thread_name(thread, first), thread_name(thread, end))).tobytes()
