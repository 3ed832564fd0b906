"""Give each worker a model folder of its own. What the mock answers, and its KV, depend on the weights in it.

So a worker can serve other weights under the same name, and KV that two models share makes an answer of neither.
"""

import os
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.workers.engines.mock.answers import answer_token, prompt_digest
from kvmesh.workers.engines.mock.vocabulary import FIRST_TOKEN

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_BYTES = 4 << 20
NUMBER_AT = 100_000  # of the file: far from its beginning and end, so that a few samples would miss it
ORIGINAL, ROLLED_OUT, OVERWRITTEN = 0, 1, 2  # the weights that there are
_NUMBER = struct.Struct("<q")
_KEY_STEP = 4096  # between the KV of equal tokens under two weights: above the tiny model's vocabulary


def make_model_folder(folder: Path) -> Path:
    """Copy the tiny model, with weights that only say which ones they are."""
    folder.mkdir(parents=True)
    for path in CHECKPOINT_DIR.iterdir():
        if path.name != WEIGHTS_FILE:
            shutil.copy(path, folder)
    roll_out(folder, ORIGINAL)
    return folder


def roll_out(folder: Path, weights: int) -> None:
    """Put a new file in the place of the old one."""
    new = folder / "new"
    with new.open("wb") as file:
        file.truncate(WEIGHTS_BYTES)
        file.seek(NUMBER_AT)
        file.write(_NUMBER.pack(weights))
    new.rename(folder / WEIGHTS_FILE)


def overwrite(folder: Path, weights: int) -> None:
    """Change the weights in place: the file keeps its inode, its size and its time."""
    path = folder / WEIGHTS_FILE
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(NUMBER_AT)
        file.write(_NUMBER.pack(weights))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def read_weights(folder: Path) -> int:
    """Return which weights a folder has; those of any other folder count as the original ones."""
    path = folder / WEIGHTS_FILE
    if folder.resolve() == CHECKPOINT_DIR.resolve():
        return ORIGINAL
    with path.open("rb") as file:
        file.seek(NUMBER_AT)
        return int(_NUMBER.unpack(file.read(_NUMBER.size))[0])


def key_of(token_id: int, weights: int) -> int:
    """Return what the KV of a token is: exact as a float32."""
    return token_id + _KEY_STEP * weights


def digest_of(prompt: Sequence[int], lora: str | None, weights: int) -> int:
    """Return all that the tokens of an answer depend on, but for their number."""
    return prompt_digest(prompt, lora) ^ (xxh3_64_intdigest(_NUMBER.pack(weights)) if weights else 0)


def token_of(prompt: Sequence[int], index: int, vocab_size: int, lora: str | None, weights: int) -> int:
    return answer_token(digest_of(prompt, lora, weights), index, range(FIRST_TOKEN, vocab_size))


@dataclass(slots=True)
class Served:
    """Weights that a worker may have answered with, from one time to another, in seconds since the run began."""

    worker: str
    weights: int
    from_s: float
    until_s: float = float("inf")


@dataclass(slots=True)
class WeightsHistory:
    """Remember which weights each worker had when. A worker that is not named had the original ones all the time."""

    changes: list[Served] = field(default_factory=list)  # to other weights than the original ones
    _only: list[Served] = field(default_factory=list)  # times in which a worker had no original ones

    def begin(self, worker: str, weights: int, now_s: float) -> Served:
        """Note that a worker may have other weights from now on."""
        served = Served(worker, weights, now_s)
        self.changes.append(served)
        return served

    def loaded(self, served: Served, now_s: float) -> Served:
        """Note that the worker has no original weights any more."""
        only = Served(served.worker, served.weights, now_s)
        self._only.append(only)
        return only

    def possible(self, worker: str, from_s: float, until_s: float) -> set[int]:
        """Return the weights that an answer may be of. `worker`: the one that decided its tokens; "": any."""
        found = {
            one.weights
            for one in self.changes
            if worker in ("", one.worker) and one.from_s < until_s and from_s < one.until_s
        }
        is_only = any(worker == one.worker and one.from_s <= from_s and until_s <= one.until_s for one in self._only)
        return found if is_only else found | {ORIGINAL}
