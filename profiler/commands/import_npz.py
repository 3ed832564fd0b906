"""Make a profile of another tool's tables: `kvmesh profile import`."""

import os
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from kvmesh.mesh.config import load
from kvmesh.profiler.files import profile_path, write_profile
from kvmesh.profiler.npz import read_npz
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import Profile
from kvmesh.workers.engines.mapping import parse_mapping


class ImportConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_PROFILE_IMPORT_<NAME>`, that over the TOML file of `--config`, that over the default."""

    npz: Annotated[str, Meta(description="archive with prefill_isl, prefill_ttft_ms, decode_active_kv_tokens, ...")]
    model: Annotated[str, Meta(description="model of the tables")]
    engine: Annotated[str, Meta(description="engine of the tables")]
    device: Annotated[str, Meta(description="device of the tables")] = "unknown"
    mapping: Annotated[str, Meta(description="tp<n>, tep<n> or dep<n>")] = "tp1"
    total_kv_tokens: Annotated[int, Meta(ge=0, description="KV tokens of a worker; 0: the decode table's most")] = 0
    max_num_seqs: Annotated[int, Meta(ge=1, description="sequences in one step")] = 256
    out_dir: Annotated[str, Meta(description="folder for the profile")] = "profiles"


def main(argv: list[str]) -> int:
    config = load(
        ImportConfig,
        argv,
        os.environ,
        prefix="KVMESH_PROFILE_IMPORT_",
        prog="kvmesh profile import",
        description="Make a profile of a NumPy archive with the field's common array names.",
        section="profile-import",
    )
    path = profile_path(Path(config.out_dir), parse_mapping(config.mapping).name)
    write_profile(imported(config), path)
    print(path)
    return 0


def imported(config: ImportConfig) -> Profile:
    """Return the profile. Raise ConfigError if the archive has no usable tables."""
    mapping = parse_mapping(config.mapping)
    bare = Profile(
        model=config.model,
        engine=config.engine,
        device=config.device,
        mapping=mapping.name,
        gpus=mapping.gpus,
        dp_size=mapping.ranks,
        notes=f"imported from {Path(config.npz).name}",
        total_kv_tokens=config.total_kv_tokens or 1,
        max_num_seqs=config.max_num_seqs,
    )
    profile = read_npz(Path(config.npz), bare)
    if config.total_kv_tokens:
        return profile
    if profile.decode is None:
        raise ConfigError("an archive without decode tables does not tell the KV cache", hint="add --total-kv-tokens")
    return replace(profile, total_kv_tokens=profile.decode.kv_tokens[-1])
