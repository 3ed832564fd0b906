"""Run `kvmesh attach`: make running servers workers of a mesh until Ctrl-C. The servers run no code of ours."""

import os
from collections.abc import Sequence

from rich.console import Console

from kvmesh.cluster.attach.attaching import attach
from kvmesh.cluster.attach.servers import AttachConfig, entries_of, process_specs
from kvmesh.mesh.config import load
from kvmesh.mesh.discovery.file import leaving_no_folder
from kvmesh.mesh.lifecycle import run

DESCRIPTION = (
    "Put a mesh in front of servers that run already: `kvmesh attach http://host:8000 [http://...]`, or "
    "`--servers FILE`, `--discover`. Each becomes a worker; an API key of theirs goes into KVMESH_ATTACH_API_KEY."
)


def main(argv: list[str]) -> int:
    urls, flags = split_urls(argv)
    config = load(
        AttachConfig,
        flags,
        os.environ,
        prefix="KVMESH_ATTACH_",
        prog="kvmesh attach",
        description=DESCRIPTION,
        section="attach",
        foreign=("KVMESH_ATTACH_API_KEY",),
    )
    specs = process_specs(config, entries_of(config, urls))
    console = Console(highlight=False)

    def tell(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False)

    with leaving_no_folder(config.discovery):
        return run(lambda stop: attach(config, specs, stop, tell))


def split_urls(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `argv` into the words before the first flag and the remaining ones."""
    at = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    return list(argv[:at]), list(argv[at:])
