"""The `kvmesh` command."""

import codecs
import importlib
import io
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
    "explain": ("kvmesh.commands.explain", "ask a running mesh where a prompt would run, and why"),
    "scale": ("kvmesh.commands.scale", "more or fewer workers in the mesh of `up`: `kvmesh scale decode=3`"),
    "workers": ("kvmesh.commands.workers", "see the workers of a mesh; drain, turn, profile them"),
    "doctor": ("kvmesh.commands.doctor", "check this machine and say what to do"),
    "certs": ("kvmesh.commands.certs", "certificates for mutual TLS within a mesh: make a CA, issue, renew"),
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
    "run a mesh": ("up", "attach", "demo", "batch", "frontend", "worker", "planner"),
    "see what it does": ("top", "explain", "replay", "bench"),
    "operate it": ("scale", "workers", "keys", "profile", "doctor"),
}
SELDOM = ("announce", "certs", "etcd-user", "memory", "nats-config", "router", "whatif", "lab")
"""Commands that only `kvmesh --help-all` lists."""
OF_LABORATORY = (  # earlier spellings: `kvmesh faults` is `kvmesh lab faults`
    "cluster-check",
    "demo-planner",
    "faults",
    "metrics-check",
    "metrics-docs",
    "overload",
    "soak",
)
ABOUT = ("help", "-h", "--help", "--help-all", "--version")
IN_ASCII = "kvmesh: in ascii"  # name of the handler of characters that an encoding does not have
LOOKALIKES = {"█": "#", "━": "=", "─": "-", "░": ".", "–": "-", "→": ">", "…": "."}  # each as wide as before
SERVICES = ("frontend", "router", "worker", "memory")  # they read their own arguments


def main() -> int:
    end_on_signals()
    open_standard_streams()
    show_children_this_checkout()
    name, rest = named(sys.argv[1:])
    from kvmesh.mesh.lifecycle import run_command  # imported only now, when a signal already ends us with one line

    if name not in COMMANDS:
        return run_command("", about, [name, *rest])
    module = importlib.import_module(COMMANDS[name][0])
    if name in SERVICES:
        sys.argv[1:] = rest
        return run_command(name, lambda _: module.main(), rest)
    return run_command(name, module.main, rest)


def named(argv: list[str]) -> tuple[str, list[str]]:
    """Return the command and its arguments: `help COMMAND ...` is `COMMAND ... --help`."""
    if argv[:1] == ["help"] and argv[1:] and not argv[1].startswith("-"):
        argv = [*argv[1:], "--help"]
    if argv and argv[0] in OF_LABORATORY:
        argv = ["lab", *argv]
    return (argv[0], argv[1:]) if argv else ("--help", [])


def about(argv: list[str]) -> int:
    """Print the version or the list of commands. Raise ConfigError for an unknown command."""
    name = argv[0]
    if name == "--version":
        from kvmesh.protocol.version import RELEASE

        print(f"kvmesh {RELEASE}")
        return 0
    if name in ABOUT:
        print(usage(with_seldom="--help-all" in argv))
        return 0
    from kvmesh.mesh.config import unknown

    raise unknown(f"command {name!r}", name, [*COMMANDS, *OF_LABORATORY, *ABOUT], f"there are:\n\n{usage()}")


def open_standard_streams() -> None:
    """A shell may start us with some closed; the next file or socket would then be taken for stdout."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process runs
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    codecs.register_error(IN_ASCII, in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors=IN_ASCII)


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return what a terminal without Unicode shows instead of characters that it does not have."""
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    return "".join(LOOKALIKES.get(char, "?") for char in missing), error.end


def show_children_this_checkout() -> None:
    """Let children, which start with -P, find this package where `python -m` found it: in the working directory."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not sys.flags.safe_path and sys.path[:1] == [home]:
        others = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{home}{os.pathsep}{others}" if others else home


def usage(with_seldom: bool = False) -> str:
    """Return the list of commands, with those that few people need."""
    groups = GROUPS | ({"what few people need": SELDOM} if with_seldom else {})
    parts = ["usage: kvmesh <command> [options]; `kvmesh help <command>` lists them"]
    for title, names in groups.items():
        listed = [f"  {name:<13} {COMMANDS[name][1]}" for name in names if name in COMMANDS]
        parts.append("\n".join([f"{title}:", *listed]))
    if not with_seldom:
        parts.append("`kvmesh --help-all` lists the rest, `kvmesh --version` prints the version")
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
