"""The `kvmesh` command."""

import importlib
import os
import sys

from kvmesh.mesh.extensions import EXTENSIONS
from kvmesh.mesh.starting import end_on_signals

OF_CORE = {
    "up": ("kvmesh.commands.up", "run a mesh on this host until Ctrl-C"),
    "demo": ("kvmesh.commands.demo", "start a mesh, send it real requests, show what happened"),
    "frontend": ("kvmesh.frontend.__main__", "one frontend: OpenAI's API in, tokens out"),
    "router": ("kvmesh.router.__main__", "one router in a process of its own"),
    "worker": ("kvmesh.workers.__main__", "one worker: prefill, decode or aggregated"),
    "planner": ("kvmesh.commands.planner", "decide how many workers run; `kvmesh planner explain` shows the reasons"),
    "top": ("kvmesh.commands.top", "a running mesh in this terminal, as the live page at /ui shows it"),
    "explain": ("kvmesh.commands.explain", "ask a running mesh where a prompt would run, and why"),
    "replay": ("kvmesh.simulator.replay", "simulate a mesh under a trace or synthetic load"),
    "bench": ("kvmesh.commands.bench.parts", "measure any OpenAI endpoint as its users see it: `kvmesh bench serve`"),
    "workers": ("kvmesh.commands.workers", "see the workers of a mesh; drain, turn, profile them, with an admin key"),
    "keys": ("kvmesh.commands.keys", "make and show the lines of a file of API keys"),
    "doctor": ("kvmesh.commands.doctor", "check this machine and say what to do"),
    "certs": ("kvmesh.commands.certs", "certificates for mutual TLS within a mesh: make a CA, issue, renew"),
    "whatif": ("kvmesh.commands.whatif", "recent requests again, simulated with other workers, caches or policies"),
    "lab": (
        "kvmesh.commands.laboratory",
        "faults, overload, benchmarks of the parts: `kvmesh lab` lists them (a checkout)",
    ),
}
COMMANDS = OF_CORE | {
    name: (f"kvmesh.{module}", text) for one in EXTENSIONS for name, (module, text) in one.commands.items()
}
"""The module of each command, and a line for --help."""
GROUPS = {
    "run a mesh": ("up", "attach", "demo", "batch", "frontend", "router", "worker", "planner"),
    "see what it does": ("top", "explain", "replay", "bench"),
    "operate it": ("workers", "keys", "profile", "doctor"),
}
SELDOM = ("announce", "certs", "etcd-user", "memory", "nats-config", "whatif", "lab")  # `kvmesh --help-all` lists them
OF_LABORATORY = (  # earlier spellings: `kvmesh faults` is `kvmesh lab faults`
    "cluster-check",
    "demo-planner",
    "faults",
    "metrics-check",
    "metrics-docs",
    "overload",
    "soak",
)
SERVICES = ("frontend", "router", "worker", "memory")  # they read their own arguments


def main() -> int:
    end_on_signals()
    open_standard_streams()
    show_children_this_checkout()
    argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        print(usage(with_seldom="--help-all" in argv))
        return 0
    name, rest = argv[0], argv[1:]
    if name in OF_LABORATORY:
        name, rest = "lab", argv
    from kvmesh.mesh.lifecycle import run_command  # imported only now, when a signal already ends us with one line

    if name not in COMMANDS:
        print(f"kvmesh: no command {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[name][0])
    if name in SERVICES:
        sys.argv[1:] = rest
        return run_command(name, lambda _: module.main(), rest)
    return run_command(name, module.main, rest)


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


def usage(with_seldom: bool = False) -> str:
    """Return the list of commands, with those that few people need."""
    groups = GROUPS | ({"what few people need": SELDOM} if with_seldom else {})
    parts = ["usage: kvmesh <command> [options]; `kvmesh <command> --help` lists them"]
    for title, names in groups.items():
        listed = [f"  {name:<13} {COMMANDS[name][1]}" for name in names if name in COMMANDS]
        parts.append("\n".join([f"{title}:", *listed]))
    if not with_seldom:
        parts.append("`kvmesh --help-all` lists the rest")
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
