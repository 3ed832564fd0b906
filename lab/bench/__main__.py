"""Run `kvmesh lab bench <benchmark>`: measure one part."""

import importlib
import sys

from kvmesh.commands.bench.ending import ended_by_sigterm
from kvmesh.mesh.config import unknown
from kvmesh.mesh.lifecycle import run_command

BENCHMARKS = {
    "frontend": ("kvmesh.lab.bench.frontend", "CPU of frontend and router for a request and a token, latency, memory"),
    "pairs": ("kvmesh.lab.bench.pairs", "two settings of the frontend in pairs: CPU for a request, by ratio"),
    "many": ("kvmesh.lab.bench.many", "many workers: time of a placement while some join or fail"),
    "index": ("kvmesh.lab.bench.index", "the prefix index: time of an event and of a lookup, memory"),
    "engine": ("kvmesh.lab.bench.engine", "a mesh of one vLLM worker against `vllm serve`; `engine steps`: torch"),
    "kv": ("kvmesh.lab.bench.kv", "KV in host memory: speed of what comes back, cost for what never does"),
    "planner": ("kvmesh.lab.bench.planner", "the planner against other policies: SLO and GPU-hours, simulated"),
    "fidelity": ("kvmesh.lab.bench.fidelity", "a live run of mock workers against its simulation"),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] not in BENCHMARKS:
        raise unknown(f"benchmark {argv[0]!r}", argv[0], ["serve", *BENCHMARKS], f"there are: {', '.join(BENCHMARKS)}")
    with ended_by_sigterm():
        return int(importlib.import_module(BENCHMARKS[argv[0]][0]).main(argv[1:]))


def usage() -> str:
    lines = [f"  {name:<10} {text}" for name, (_, text) in BENCHMARKS.items()]
    head = "usage: kvmesh lab bench <benchmark> [options]; `... <benchmark> --help` lists them"
    return "\n".join([head, "", *lines])


if __name__ == "__main__":
    sys.exit(run_command("bench", main, sys.argv[1:]))
