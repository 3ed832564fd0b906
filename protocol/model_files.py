"""The files of a model that a frontend reads, named by their contents, so that they can come from any worker."""

import hashlib
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

MODEL_FILE_NAMES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
MAX_MODEL_FILE_BYTES = 256 << 20  # the largest known tokenizer.json has 33 MB


class ModelFile(Struct, frozen=True, array_like=True):
    """A file of a model's folder. `sha256` is in lower case."""

    name: Annotated[str, Meta(max_length=64)]
    num_bytes: Annotated[int, Meta(ge=0, le=MAX_MODEL_FILE_BYTES)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


def fingerprint(files: Sequence[ModelFile]) -> str:
    """Return a name for these files together, 64 hexadecimal digits; "" for none."""
    if not files:
        return ""
    lines = [f"{file.name} {file.num_bytes} {file.sha256}\n" for file in sorted(files, key=lambda file: file.name)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
