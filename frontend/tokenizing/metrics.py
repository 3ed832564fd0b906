"""Count how often a piece of a prompt needed no tokenizing."""

from kvmesh.mesh.measure import locked_counter

_P = "kvmesh_frontend_tokenizer_"

PIECES = locked_counter(_P + "cache_pieces_total")
HITS = PIECES.labels("yes")
MISSES = PIECES.labels("no")
ENCODED_CHARS = locked_counter(_P + "encoded_chars_total")
