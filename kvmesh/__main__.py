"""The `kvmesh` command."""

import importlib
import os
import sys

from kvmesh.mesh.starting import end_on_signals

COMMANDS = {
    "up": ("kvmesh.commands.up", "run a mesh on this host until Ctrl-C"),
    "attach": ("kvmesh.commands.attach", "put a mesh in front of running servers: vLLM, SGLang, llama.cpp, ..."),
    "announce": ("kvmesh.commands.announce", "publish a running server, for `kvmesh attach --discover`"),
    "demo": ("kvmesh.commands.demo", "start a mesh, send it real requests, show what happened"),
    "doctor": ("kvmesh.commands.doctor", "check this machine and say what to do"),
    "cluster-check": (
        "kvmesh.lab.hosts.command",
        "a mesh on four hosts of this machine, under every fault (root)",
    ),
    "faults": ("kvmesh.lab.faults.command", "a mesh on this machine under a seeded schedule of faults, with an oracle"),
    "soak": ("kvmesh.lab.soak", "a mesh on this machine under everything for a long time: does a process grow?"),
    "explain": ("kvmesh.commands.explain", "ask a running mesh where a prompt would run, and why"),
    "top": ("kvmesh.commands.top", "a running mesh in this terminal, as the live page at /ui shows it"),
    "whatif": ("kvmesh.commands.whatif", "recent requests again, simulated with other workers, caches or policies"),
    "batch": ("kvmesh.commands.batch.command", "send a file of requests, in OpenAI's batch format, to a running mesh"),
    "workers": ("kvmesh.commands.workers", "see the workers of a mesh; drain, turn, profile them, with an admin key"),
    "planner": ("kvmesh.commands.planner", "decide how many workers run; `kvmesh planner explain` shows the reasons"),
    "certs": ("kvmesh.commands.certs", "certificates for mutual TLS within a mesh: make a CA, issue, renew"),
    "keys": ("kvmesh.commands.keys", "make and show the lines of a file of API keys"),
    "etcd-user": ("kvmesh.commands.etcd_user", "have etcd ask for passwords, and make the users of a mesh"),
    "nats-config": ("kvmesh.commands.nats_config", "print the users of a NATS server, each with the least rights"),
    "metrics-docs": (
        "kvmesh.lab.observability.write",
        "write docs/metrics.md and the dashboards anew (--check: are they old?)",
    ),
    "metrics-check": (
        "kvmesh.lab.observability.check",
        "check metrics, dashboards and alerts on a running mesh and Prometheus",
    ),
    "overload": ("kvmesh.lab.overload.command", "what a mesh answers in time at 1, 3 and 10 times what it can do"),
    "demo-planner": ("kvmesh.lab.demo_planner", "a load that triples and falls, and a planner that follows it"),
    "replay": ("kvmesh.simulator.replay", "simulate a mesh under a trace or synthetic load"),
    "profile": ("kvmesh.profiler.__main__", "measure or estimate a worker; plan a deployment for an SLO"),
    "bench": (
        "kvmesh.lab.bench.__main__",
        "measure a part: frontend, streams, engine, index, many, picker, planner, ...",
    ),
}
SERVICES = {
    "frontend": ("kvmesh.frontend.__main__", "one frontend: OpenAI's API in, tokens out"),
    "router": ("kvmesh.router.__main__", "one router in a process of its own"),
    "worker": ("kvmesh.workers.__main__", "one worker: prefill, decode or aggregated"),
    "memory": ("kvmesh.workers.memory.__main__", "weights of this host's torch workers, loaded once for all of them"),
}


def main() -> int:
    end_on_signals()
    open_standard_streams()
    show_children_this_checkout()
    argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, rest = argv[0], argv[1:]
    from kvmesh.mesh.lifecycle import run_command  # imported only now, when a signal already ends us with one line

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


def show_children_this_checkout() -> None:
    """Let children, which start with -P, find this package where `python -m` found it: in the working directory."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not sys.flags.safe_path and sys.path[:1] == [home]:
        others = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{home}{os.pathsep}{others}" if others else home


def usage() -> str:
    rows = (COMMANDS | SERVICES).items()
    lines = [f"  {name:<13} {text}" for name, (_, text) in rows]
    return "\n".join(["usage: kvmesh <command> [options]; `kvmesh <command> --help` lists them", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
