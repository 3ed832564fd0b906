"""Run `kvmesh bench serve`. All other benchmarks measure parts of kvmesh, and belong to the laboratory."""

from kvmesh.commands import laboratory
from kvmesh.commands.bench.ending import ended_by_sigterm

USAGE = """usage: kvmesh bench serve [options]; `kvmesh bench serve --help` lists them

  serve         any OpenAI endpoint as its users see it: TTFT, ITL, goodput, saturation

`kvmesh lab bench` lists the benchmarks of kvmesh's own parts"""


def main(argv: list[str]) -> int:
    """Raise ConfigError for the name of no benchmark."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv[0] != "serve":  # an earlier spelling
        return laboratory.main(["bench", *argv])
    from kvmesh.commands.bench.command import main as serve

    with ended_by_sigterm():
        return serve(argv[1:])
