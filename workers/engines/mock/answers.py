"""The mock's answers: pure functions of a prompt, so that a test can tell what each request must get."""

from collections.abc import Sequence
from struct import Struct

import numpy as np
from xxhash import xxh3_64_intdigest

from kvmesh.protocol.hashing import hash_seed, token_bytes
from kvmesh.workers.engines.mock.vocabulary import FIRST_TOKEN

VECTOR_DIMENSIONS = 64
_PAIR = Struct("<QQ")


def mock_token(prompt: Sequence[int], index: int, vocab_size: int, lora: str | None = None) -> int:
    """Token number `index` of the answer to `prompt`, with a vocabulary that has special tokens at its start alone."""
    return answer_token(prompt_digest(prompt, lora), index, range(FIRST_TOKEN, vocab_size))


def prompt_digest(prompt: Sequence[int], lora: str | None) -> int:
    """Return all that the tokens of an answer depend on, but for their number: u64."""
    return xxh3_64_intdigest(token_bytes(prompt), hash_seed(lora, None))


def answer_token(digest: int, index: int, answers: range) -> int:
    return answers.start + xxh3_64_intdigest(_PAIR.pack(digest, index)) % len(answers)


def mock_vector(prompt: Sequence[int], lora: str | None = None) -> bytes:
    """The embedding of `prompt`: float32 little endian [VECTOR_DIMENSIONS], of length 1."""
    digest = prompt_digest(prompt, lora)
    drawn = [xxh3_64_intdigest(_PAIR.pack(digest, i)) for i in range(VECTOR_DIMENSIONS)]
    vector = np.array(drawn, np.float64) / 2**63 - 1  # in [-1, 1]
    return (vector / np.linalg.norm(vector)).astype("<f4").tobytes()
