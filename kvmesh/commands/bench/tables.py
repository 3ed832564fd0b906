"""The tables of `kvmesh bench serve`."""

from collections.abc import Sequence

from rich.table import Table

from kvmesh.commands.bench.checking import OK
from kvmesh.commands.bench.results import EndpointFacts, PointResult, SaturationPoint, ServeReport
from kvmesh.simulator.report import Spread

COLUMNS = (
    "endpoint",
    "load",
    "ok/sent",
    "req/s",
    "out tok/s",
    "tok/s/user",
    "TTFT p50/p99 ms",
    "ITL p50/p99 ms",
    "TPOT p50/p99 ms",
    "e2e p50/p99 ms",
    "SLO",
    "goodput/s",
)


def checks_table(found: Sequence[EndpointFacts]) -> Table:
    table = Table(title="Endpoints", title_justify="left")
    for column in ("endpoint", "model", "check", "found"):
        table.add_column(column, overflow="fold")
    for facts in found:
        for number, (name, said) in enumerate(facts.checks.items()):
            shown = said if said == OK else f"[red]{said}[/red]"
            table.add_row(*((facts.name, facts.model) if not number else ("", "")), name, shown)
    return table


def row_of(result: PointResult) -> list[str]:
    """Return the cells of a point, in the order of COLUMNS."""
    return [
        result.endpoint,
        result.point.label,
        f"{result.completed}/{result.requests}",
        f"{result.requests_per_s:.2f}",
        f"{result.output_tokens_per_s:.0f}",
        f"{result.tokens_per_s_user:.1f}",
        _ms(result.ttft_s),
        _ms(result.itl_s),
        _ms(result.tpot_s),
        _ms(result.e2e_s),
        f"{result.attainment:.1%}",
        f"{result.goodput_rps:.2f}",
    ]


def _ms(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.p50 * 1e3:.1f} / {spread.p99 * 1e3:.1f}"


def points_table(results: Sequence[PointResult]) -> Table:
    table = Table(title="Points", title_justify="left")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=number > 1)
    for result in results:
        table.add_row(*row_of(result))
    return table


def saturation_line(found: SaturationPoint) -> str:
    unit = "req/s" if found.kind == "rate" else "clients"
    prefix = f" (prefix {found.prefix_ratio:.0%})" if found.prefix_ratio else ""
    if found.at is None:
        where = f"not saturated up to {found.last_below:g} {unit}"
    elif found.last_below is None:
        where = f"saturated at the first point already, {found.at:g} {unit}"
    else:
        where = f"saturated from {found.at:g} {unit} on, not yet at {found.last_below:g}"
    goodput = "no request met the SLO"
    if found.most_goodput_at is not None:
        goodput = f"most goodput {found.most_goodput_rps:.2f} req/s at {found.most_goodput_at:g} {unit}"
    return f"{found.endpoint}{prefix}: {where}; at most {found.most_requests_per_s:.2f} req/s; {goodput}"


def generator_line(results: Sequence[PointResult]) -> str:
    """Return how near the load generator came to its own limit."""
    loads = [result.generator for result in results if result.generator is not None]
    if not loads:
        return "the driver does not say what it took itself"
    share, lag = max(load.cpu_share for load in loads), max(load.lag_p99_s for load in loads)
    busiest = max((r for r in results if r.generator), key=lambda r: r.generator.cpu_share if r.generator else 0.0)
    limit = f"; a full core would send about {busiest.limit_rps:.0f} req/s like those of {busiest.point.label}"
    limit = limit if busiest.limit_rps else ""
    return f"load generator: at most {share:.0%} of a core, sent at most {lag * 1e3:.1f} ms late (p99){limit}"


def lines_of(report: ServeReport) -> list[str]:
    """Return what follows the tables."""
    lines = [saturation_line(found) for found in report.saturation]
    return [*lines, generator_line(report.points), *(f"warning: {warning}" for warning in report.warnings)]
