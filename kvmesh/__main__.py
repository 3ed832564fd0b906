"""The `kvmesh` command."""

import importlib
import os
import sys

from mesh.starting import end_on_signals

COMMANDS = {
    "up": ("kvmesh.up", "run a mesh on this host until Ctrl-C"),
    "attach": ("kvmesh.attach", "put a mesh in front of running servers: vLLM, SGLang, llama.cpp, ..."),
    "announce": ("kvmesh.announce", "publish a running server, for `kvmesh attach --discover`"),
    "demo": ("kvmesh.demo", "start a mesh, send it real requests, show what happened"),
    "doctor": ("kvmesh.doctor", "check this machine and say what to do"),
    "cluster-check": ("kvmesh.cluster_check", "a mesh on four hosts of this machine, under every fault (root)"),
    "faults": ("kvmesh.faults", "a mesh on this machine under a seeded schedule of faults, with an oracle"),
    "soak": ("kvmesh.soak", "a mesh on this machine under everything for a long time: does a process grow?"),
    "explain": ("kvmesh.explain", "ask a running mesh where a prompt would run, and why"),
    "top": ("kvmesh.top", "a running mesh in this terminal, as the live page at /ui shows it"),
    "whatif": ("kvmesh.whatif", "recent requests again, simulated with other workers, caches or policies"),
    "batch": ("kvmesh.batch.command", "send a file of requests, in OpenAI's batch format, to a running mesh"),
    "workers": ("kvmesh.workers", "see the workers of a mesh; drain, turn, profile them, with an admin key"),
    "planner": ("kvmesh.planner", "decide how many workers run; `kvmesh planner explain` shows the reasons"),
    "certs": ("kvmesh.certs", "certificates for mutual TLS within a mesh: make a CA, issue, renew"),
    "keys": ("kvmesh.keys", "make and show the lines of a file of API keys"),
    "etcd-user": ("kvmesh.etcd_user", "have etcd ask for passwords, and make the users of a mesh"),
    "nats-config": ("kvmesh.nats_config", "print the users of a NATS server, each with the least rights"),
    "metrics-docs": (
        "kvmesh.observability.write",
        "write docs/metrics.md and the dashboards anew (--check: are they old?)",
    ),
    "metrics-check": (
        "kvmesh.observability.check",
        "check metrics, dashboards and alerts on a running mesh and Prometheus",
    ),
    "overload": ("kvmesh.overload.command", "what a mesh answers in time at 1, 3 and 10 times what it can do"),
    "demo-planner": ("kvmesh.demo_planner", "a load that triples and falls, and a planner that follows it"),
    "replay": ("simulator.replay", "simulate a mesh under a trace or synthetic load"),
    "profile": ("profiler.__main__", "measure or estimate a worker; plan a deployment for an SLO"),
    "bench": ("benchmarks.__main__", "measure a part: frontend, streams, engine, index, many, picker, planner, ..."),
}
SERVICES = {
    "frontend": ("frontend.__main__", "one frontend: OpenAI's API in, tokens out"),
    "router": ("router.__main__", "one router in a process of its own"),
    "worker": ("workers.__main__", "one worker: prefill, decode or aggregated"),
    "memory": ("workers.memory.__main__", "weights of this host's torch workers, loaded once for all of them"),
}


def main() -> int:
    end_on_signals()
    open_standard_streams()
    argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, rest = argv[0], argv[1:]
    from mesh.lifecycle import run_command  # imported only now, when a signal already ends us with one line

    if name in COMMANDS:
        return run_command(name, importlib.import_module(COMMANDS[name][0]).main, rest)
    if name in SERVICES:
        sys.argv[1:] = rest
        service = importlib.import_module(SERVICES[name][0])
        return run_command(name, lambda _: service.main(), rest)
    print(f"kvmesh: no command {name!r}\n\n{usage()}", file=sys.stderr)
    return 2


def open_standard_streams() -> None:
    """A shell may start us with some closed; the next file or socket would then be taken for stdout."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process runs
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def usage() -> str:
    rows = (COMMANDS | SERVICES).items()
    lines = [f"  {name:<13} {text}" for name, (_, text) in rows]
    return "\n".join(["usage: kvmesh <command> [options]; `kvmesh <command> --help` lists them", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
