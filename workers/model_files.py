"""Offer the files that frontends need to frontends that have no folder of the model."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvmesh.mesh.plane.server import Call
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import ModelFilePart, ModelFileRequest, decode
from kvmesh.protocol.model_files import MAX_MODEL_FILE_BYTES, MODEL_FILE_NAMES, ModelFile

log = logging.getLogger(__name__)

PART_BYTES = 256 << 10


def model_files(folder: Path) -> list[ModelFile]:
    """Return the files of a model's folder that a frontend reads. It takes 0.1 s for a large tokenizer."""
    found: list[ModelFile] = []
    for name in MODEL_FILE_NAMES:
        try:
            data = (folder / name).read_bytes()
        except OSError:
            continue
        if len(data) > MAX_MODEL_FILE_BYTES:
            log.warning("%s has %d bytes and is not offered to frontends", folder / name, len(data))
            continue
        found.append(ModelFile(name, len(data), hashlib.sha256(data).hexdigest()))
    return found


class OfferedFiles:
    """Answers worker method `model_file`. A caller names a file by its hash, so no path comes from outside."""

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}

    def offer(self, folder: Path, files: Sequence[ModelFile]) -> None:
        self._paths = {file.sha256: folder / file.name for file in files}

    async def answer(self, call: Call) -> None:
        """Send a file in parts. Raises InvalidRequestError for a file that this worker does not have."""
        asked = decode(call.body, ModelFileRequest)
        if (path := self._paths.get(asked.sha256)) is None:
            raise InvalidRequestError("this worker has no such model file", hint="ask another worker of the model")
        for part in parts_of(path):
            await call.send(ModelFilePart(data=part))


def parts_of(path: Path) -> Iterator[bytes]:
    """Yield the contents of a file; a part is in the page cache, because the worker has read it at its start."""
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            yield part
