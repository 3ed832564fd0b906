"""Read the token ids that the tokenizer of a model's folder has: the mock invents only ids that mean a text."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvmesh.protocol.errors import ConfigError

FIRST_TOKEN = 3  # below are special tokens, and the mock's own end of sequence


@dataclass(frozen=True, slots=True)
class Vocabulary:
    size: int  # every id is below
    answers: range  # ids that are no special tokens


class _AddedToken(msgspec.Struct):
    id: int
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[msgspec.Raw]  # Unigram models have a list


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []


def read_vocabulary(folder: Path) -> Vocabulary:
    """Raises ConfigError if there is no tokenizer.json, or nothing in it to answer with."""
    path = folder / "tokenizer.json"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="give --model-path a folder with a tokenizer.json"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no tokenizer: {error}") from error
    vocab = file.model.vocab
    ids = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
    special = {token.id for token in file.added_tokens if token.special}
    ids |= {token.id for token in file.added_tokens}
    if not (plain := sorted(id_ for id_ in ids - special if id_ >= FIRST_TOKEN)):
        raise ConfigError(f"{path} has no token that is not special")
    return Vocabulary(max(ids) + 1, _longest_run(plain))


def _longest_run(ids: list[int]) -> range:
    """The most ids without a gap. `ids`: sorted, not empty."""
    best = run = range(ids[0], ids[0] + 1)
    for id_ in ids[1:]:
        run = range(run.start, id_ + 1) if id_ == run.stop else range(id_, id_ + 1)
        if len(run) > len(best):
            best = run
    return best
