"""Count how often a piece of a prompt needed no tokenizing."""

from prometheus_client import Counter

_P = "kvmesh_frontend_tokenizer_"

PIECES = Counter(_P + "cache_pieces_total", "Pieces of prompts looked up in the tokenizer's cache.", ["found"])
HITS = PIECES.labels("yes")
MISSES = PIECES.labels("no")
ENCODED_CHARS = Counter(_P + "encoded_chars_total", "Characters that were tokenized, not found in the cache.")
