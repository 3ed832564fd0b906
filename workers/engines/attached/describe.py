"""Describe an attached server to the mesh: from its own words, the settings and its model's folder."""

from pathlib import Path

import msgspec

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import NO_LAYOUT
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import EngineInfo
from kvmesh.workers.engines.attached.server import AttachedServer


def model_folder(config: WorkerConfig, server: AttachedServer) -> Path:
    """Return where the tokenizer is: as set, or where the server has the model from if that is a folder here.

    Raise ConfigError if neither has a tokenizer.json.
    """
    for folder in (config.model_path, server.root):
        if folder and (Path(folder) / "tokenizer.json").is_file():
            return Path(folder).resolve()
    where = f"--model-path is {config.model_path!r}" if config.model_path else "there is no --model-path"
    there = f"the server has its model from {server.root!r}" if server.root else "the server names no folder"
    raise ConfigError(
        f"{where}, and {there}: no tokenizer.json is found",
        hint="give --model-path the model's Hugging Face folder: the mesh tokenizes with it",
    )


def info_of(config: WorkerConfig, server: AttachedServer, folder: Path, *, tells_events: bool) -> EngineInfo:
    """Raise ConfigError if this kind of server lacks the role, or says less of itself than is needed."""
    return EngineInfo(
        model=server.model,
        model_path=str(folder),
        block_size=server.block_size or config.block_size,
        total_blocks=server.num_blocks or config.num_blocks,
        context_tokens=server.context_tokens or _context_of(folder),
        max_num_seqs=server.slots or config.max_num_seqs,
        layout=NO_LAYOUT,
        transfer=server.kind.transfer(config.role, server),
        features=server.features,
        loras=server.loras,
        tells_events=tells_events,
        retokenizes=not server.kind.returns_token_ids,
    )


class _ModelConfig(msgspec.Struct):
    max_position_embeddings: int


def _context_of(folder: Path) -> int:
    """Raise ConfigError if the model's config.json does not say."""
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=_ModelConfig).max_position_embeddings
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"the server does not tell its context, and {folder}/config.json neither: {error}",
            hint="give --model-path the model's Hugging Face folder",
        ) from error
