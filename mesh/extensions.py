"""The extensions: what a mesh can serve requests without. This table is the only place that names them all.

The core offers seams (endpoints of the frontend, discovery backends, engines, ...). An extension implements seams, each
in a folder with a module `extension`, whose `EXTENSION` has the type that the seam defines. The core loads that module
by its name in this table and imports nothing else of the folder; `tests/test_extensions.py` asserts it. Deleting an
extension's folders and its entry here leaves a mesh that works without it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

Seam = Literal["frontend", "discovery", "events", "engine", "connector", "store", "weights", "router"]


@dataclass(frozen=True, slots=True)
class Extension:
    """One extension: its name, and the folder that implements each seam."""

    name: str
    seams: Mapping[Seam, str] = field(default_factory=dict)  # folder below the root of the repository
    needs: tuple[str, ...] = ()  # other extensions whose modules it imports
    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # module below kvmesh, line of --help
    folders: tuple[str, ...] = ()  # folders that belong to it and implement no seam

    @property
    def all_folders(self) -> tuple[str, ...]:
        return (*dict.fromkeys(self.seams.values()), *self.folders)


EXTENSIONS: Sequence[Extension] = (
    Extension(
        "keys",
        {"frontend": "frontend/keys"},
        commands={"keys": ("frontend.keys.command", "make and show the lines of a file of API keys")},
    ),
    Extension("responses", {"frontend": "frontend/responses"}),
    Extension("anthropic", {"frontend": "frontend/anthropic"}),
    Extension(
        "whatif",
        {"frontend": "frontend/whatif"},
        needs=("simulator",),
        commands={
            "whatif": (
                "commands.whatif.command",
                "recent requests again, simulated with other workers, caches or policies",
            )
        },
        folders=("simulator/whatif", "kvmesh/commands/whatif"),
    ),
    Extension(
        "live",
        {"frontend": "frontend/live"},
        needs=("whatif",),
        commands={"top": ("commands.top.command", "a running mesh in this terminal, as the live page at /ui shows it")},
        folders=("kvmesh/commands/top",),
    ),
    Extension("picker", {"router": "frontend/picker"}),
    Extension(
        "etcd",
        {"discovery": "mesh/discovery/etcd"},
        commands={
            "etcd-user": ("mesh.discovery.etcd.command", "have etcd ask for passwords, and make the users of a mesh")
        },
    ),
    Extension("kubernetes", {"discovery": "mesh/discovery/kubernetes", "connector": "planner/connectors/kubernetes"}),
    Extension(
        "nats",
        {"events": "kvevents/nats"},
        commands={
            "nats-config": ("kvevents.nats.command", "print the users of a NATS server, each with the least rights")
        },
    ),
    Extension("external", folders=("workers/engines/external",)),
    Extension("vllm", {"engine": "workers/engines/vllm"}, needs=("external",)),
    Extension("sglang", {"engine": "workers/engines/sglang"}, needs=("external",)),
    Extension("trtllm", {"engine": "workers/engines/trtllm"}, needs=("external",)),
    Extension(
        "attach",
        {"engine": "workers/engines/attached"},
        needs=("external", "vllm", "sglang"),
        commands={
            "attach": (
                "cluster.attach.command",
                "put a mesh in front of running servers: vLLM, SGLang, llama.cpp, ...",
            ),
            "announce": ("cluster.attach.announce", "publish a running server, for `kvmesh attach --discover`"),
        },
        folders=("cluster/attach",),
    ),
    Extension(
        "simulator",
        commands={"replay": ("simulator.replay", "simulate a mesh under a trace or synthetic load")},
        folders=("simulator",),
    ),
    Extension(
        "bench",
        needs=("simulator",),
        commands={
            "bench": ("commands.bench.parts", "measure any OpenAI endpoint as its users see it: `kvmesh bench serve`")
        },
        folders=("kvmesh/commands/bench",),
    ),
    Extension(
        "profile",
        needs=("attach", "simulator"),
        commands={"profile": ("profiler.__main__", "measure or estimate a worker; plan a deployment for an SLO")},
        folders=("profiler",),
    ),
    Extension(
        "batch",
        commands={"batch": ("commands.batch.command", "send a file of requests, in OpenAI's batch format, to a mesh")},
        folders=("kvmesh/commands/batch",),
    ),
    Extension("s3", {"store": "kvcache/tiers/s3"}),
    Extension(
        "memory",
        {"weights": "workers/memory"},
        commands={
            "memory": ("workers.memory.__main__", "weights of this host's torch workers, loaded once for all of them")
        },
    ),
)
"""All extensions. Where order matters (endpoints, hooks of a request), it is this one."""


def load(seam: Seam) -> Iterator[Any]:
    """Import the extensions of a seam in their order, and yield the `EXTENSION` of each."""
    for extension in EXTENSIONS:
        if (folder := extension.seams.get(seam)) is not None:
            yield import_module(f"kvmesh.{folder.replace('/', '.')}.extension").EXTENSION
