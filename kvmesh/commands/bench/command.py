"""Run `kvmesh bench serve`: check the endpoints, load them in turn, report."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from tokenizers import Tokenizer

from kvmesh.commands.bench.aiperf import aiperf_version, run_aiperf
from kvmesh.commands.bench.checking import check_endpoints, missing, warm_up
from kvmesh.commands.bench.config import ServeBenchConfig
from kvmesh.commands.bench.judging import MeasuredRound, ServeSlo, point_result, saturation_of, warnings_of
from kvmesh.commands.bench.manifest import manifest_of
from kvmesh.commands.bench.page import page_of
from kvmesh.commands.bench.picture import draw_report
from kvmesh.commands.bench.prompts import load_tokenizer
from kvmesh.commands.bench.results import EndpointFacts, LoadPoint, PointResult, ServeReport
from kvmesh.commands.bench.sending import SendingPlan, send
from kvmesh.commands.bench.tables import checks_table, lines_of, points_table
from kvmesh.commands.bench.texts import TextMaker, plain_words, words_of_one_token
from kvmesh.commands.bench.workload import BenchSession, CountTokens, merged_body, points_of, sessions_of
from kvmesh.mesh.config import load as load_config
from kvmesh.protocol.errors import ConfigError

EXIT_MISSING = 3  # an endpoint lacks what a run needs

Tell = Callable[[str], None]


def main(argv: list[str]) -> int:
    config = load_config(
        ServeBenchConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh bench serve",
        description="Load OpenAI-compatible endpoints, ours or others, and report what their users see: time to first "
        "token, time per token, throughput, goodput, the point of saturation, and the load generator's own limit. "
        "Several endpoints are asked the same, in turn.",
        section="bench",
    )
    points = points_of(config)
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
    driver_version = aiperf_version(config.aiperf) if config.driver == "aiperf" else ""
    manifest = manifest_of(config, argv, driver_version)
    console = Console(stderr=True)
    found = asyncio.run(check_endpoints(config, tokenizer))
    console.print(checks_table(found))
    if lacking := missing(found):
        for line in lacking:
            console.print(f"cannot be measured: {line}", style="red", highlight=False)
        return EXIT_MISSING
    if config.check_only:
        return 0
    results = measured(config, points, found, tokenizer, lambda line: console.print(line, highlight=False))
    report = ServeReport(
        manifest=manifest,
        endpoints=found,
        points=results,
        saturation=saturation_of(results),
        warnings=warnings_of(results),
    )
    show(report, config)
    return 0 if any(result.completed for result in results) else 1


def measured(
    config: ServeBenchConfig,
    points: Sequence[LoadPoint],
    found: Sequence[EndpointFacts],
    tokenizer: Tokenizer | None,
    tell: Tell,
) -> list[PointResult]:
    """Measure every point at every endpoint. Endpoints take turns within a round, and at being the first."""
    for facts in found:
        asyncio.run(warm_up(facts, config, config.warmup))
    slo = ServeSlo(config.ttft_slo_s, config.itl_slo_s, config.e2e_slo_s)
    results: list[PointResult] = []
    for point in points:
        if config.driver == "aiperf":
            sessions = _sessions(config, point, 0, found[0], tokenizer)
            for facts in found:
                tell(f"{facts.name}: {point.label}, {len(sessions)} conversations, by AIPerf")
                results.append(run_aiperf(config, facts, point, slo, sessions))
            continue
        rounds: dict[str, list[MeasuredRound]] = {facts.name: [] for facts in found}
        for number in range(config.rounds):
            sessions = _sessions(config, point, number, found[0], tokenizer)
            for turn in range(len(found)):
                facts = found[(number + turn) % len(found)]
                tell(f"{facts.name}: {point.label}, {len(sessions)} conversations, round {number + 1}")
                rounds[facts.name].append(_one_round(config, facts, point, sessions))
        results += [point_result(facts.name, point, rounds[facts.name], slo, config.gpus) for facts in found]
    return results


def _sessions(
    config: ServeBenchConfig, point: LoadPoint, number: int, facts: EndpointFacts, tokenizer: Tokenizer | None
) -> list[BenchSession]:
    """Return the same requests for all endpoints, sized as the first one counts."""
    words = words_of_one_token(tokenizer) if tokenizer else plain_words()
    texts = TextMaker(words, 1 / facts.words_per_token, facts.template_tokens, config.seed)
    return sessions_of(config, point, number, texts, _counter(tokenizer))


def _counter(tokenizer: Tokenizer | None) -> CountTokens | None:
    if tokenizer is None:
        return None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _one_round(
    config: ServeBenchConfig, facts: EndpointFacts, point: LoadPoint, sessions: list[BenchSession]
) -> MeasuredRound:
    sent = send(
        SendingPlan(
            url=facts.url,
            api=config.api,
            api_key=config.api_key,
            common=merged_body(config.api, facts.model, config.extra, ignore_eos=config.ignore_eos),
            sessions=sessions,
            clients=round(point.value) if point.kind == "concurrency" else 0,
            think_s=config.think_s,
            timeout_s=config.timeout_s,
        )
    )
    return MeasuredRound(sent.outcomes, sent.duration_s, sent.generator)


def show(report: ServeReport, config: ServeBenchConfig) -> None:
    """Print the tables, and write the files of --out."""
    console = Console(width=None if os.isatty(1) else 200)
    console.print(points_table(report.points))
    for line in lines_of(report):
        console.print(line, highlight=False)
    if config.out:
        folder = Path(config.out)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
            (folder / "report.html").write_text(page_of(report))
        except OSError as error:
            raise ConfigError(f"cannot write into {folder}: {error}", hint="give --out a folder") from error
        if config.png:
            draw_report(report, folder / "report.png")
        console.print(f"written: {folder}/report.json, report.html{', report.png' if config.png else ''}")
    if config.json:
        print(msgspec.json.encode(report).decode())
