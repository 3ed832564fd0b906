"""Check the cards of workers, field by field, before anything is sized, dialled or divided by them. Pure.

A card comes from another process, perhaps a broken or a hostile one. A card that cannot be right is refused by the name
of its field, and nobody else is harmed.
"""

import math
import re
from collections.abc import Iterable, Iterator

from kvmesh.protocol.messages import WorkerCard

MAX_RANKS = 256  # data-parallel ranks of one worker; the largest known deployments have 96
MAX_NAME_CHARS = 256
MAX_PATH_CHARS = 4096  # also of addresses and URLs
MAX_LORAS = 1024
MAX_FEATURES = 64
LIMITS: tuple[tuple[str, int, int], ...] = (
    ("dp_size", 1, MAX_RANKS),
    ("block_size", 1, 1 << 16),
    ("total_blocks", 1, 1 << 32),
    ("context_tokens", 1, 1 << 28),
    ("max_num_seqs", 1, 1 << 20),
)


_EVENT_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


def is_event_key(text: str) -> bool:
    """Return whether a text is a public key of ZMQ: 40 characters of Z85."""
    return _EVENT_KEY.fullmatch(text) is not None


def problem_of(card: WorkerCard, worker_id: str) -> str:
    """Return what is wrong with the card that lies under the key of `worker_id`, "" if nothing is.

    The text names the field, what was found and what was expected; it has no address and no path.
    """
    return next(_problems(card, worker_id), "")


def _problems(card: WorkerCard, worker_id: str) -> Iterator[str]:
    if card.worker_id != worker_id:
        yield "its worker_id is not that of its key"
    for field, least, most in LIMITS:
        value = getattr(card, field)
        if not least <= value <= most:
            yield f"its {field} is {value}, expected {least} to {most}"
    if not 0 < card.capacity < math.inf:
        yield f"its capacity is {card.capacity}, expected a positive number"
    pulls = (card.pull_block_s, card.pull_latency_s)
    times = [card.prefill_token_s, *pulls, *[time for tier in card.tiers for time in (tier.block_s, tier.latency_s)]]
    if not all(math.isfinite(time) for time in times) or len({tier.tier for tier in card.tiers}) < len(card.tiers):
        yield "its tiers or pulls have times that are no numbers, or one tier comes twice"
    if len(card.rank_kv_events) >= card.dp_size:
        yield f"it has {len(card.rank_kv_events)} rank_kv_events, expected fewer than its dp_size {card.dp_size}"
    names = (card.worker_id, card.name, card.model, card.transfer, card.tool_parser, card.reasoning_parser)
    yield from _too_long("a name", (*names, *card.loras[:MAX_LORAS], *card.features[:MAX_FEATURES]), MAX_NAME_CHARS)
    ranks = [text for pair in card.rank_kv_events[:MAX_RANKS] for text in pair]
    places = (card.model_path, card.address, card.kv_events, card.kv_replay, card.metrics_url, card.http_endpoint)
    if card.kv_key and not is_event_key(card.kv_key):
        yield f"its kv_key has {len(card.kv_key)} characters or bad ones, expected 40 of Z85"
    yield from _too_long("an address or path", (*places, *ranks), MAX_PATH_CHARS)
    if len(card.loras) > MAX_LORAS or len(card.features) > MAX_FEATURES:
        yield (
            f"it has {len(card.loras)} loras and {len(card.features)} features, expected at most {MAX_LORAS} and "
            f"{MAX_FEATURES}"
        )


def _too_long(what: str, texts: Iterable[str], most: int) -> Iterator[str]:
    longest = max((len(text) for text in texts), default=0)
    if longest > most:
        yield f"{what} in it has {longest} characters, expected at most {most}"
