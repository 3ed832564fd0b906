"""Report which NIXL backends can be made on this machine, as one line of JSON: `python -m kvmesh.commands.nixl_probe`.

A process of its own, because this runs native code that prints what it likes and may crash.
"""

import importlib.metadata
import os
import sys

import msgspec

from kvmesh.kvcache.transfer.nixl import import_nixl, why_unavailable


class NixlProbe(msgspec.Struct, frozen=True):
    problem: str  # why NIXL cannot be used, "" if it can
    version: str = ""
    usable: tuple[str, ...] = ()  # backends that were made
    unusable: tuple[str, ...] = ()  # plugins that came along and need something this machine lacks


def probe() -> NixlProbe:
    if problem := why_unavailable():
        return NixlProbe(problem)
    api = import_nixl()
    agent = api.nixl_agent("kvmesh-doctor", api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    usable: list[str] = []
    unusable: list[str] = []
    for plugin in sorted(agent.get_plugin_list()):
        try:
            agent.create_backend(plugin)
            usable.append(plugin)
        except Exception:  # NIXL's own, one per kind of lack
            unusable.append(plugin)
    problem = "" if "UCX" in usable else "its UCX backend does not start"
    return NixlProbe(problem, importlib.metadata.version("nixl"), tuple(usable), tuple(unusable))


def main() -> int:
    answer = os.dup(1)
    os.dup2(2, 1)  # what plugins print goes to stderr
    os.write(answer, msgspec.json.encode(probe()) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
