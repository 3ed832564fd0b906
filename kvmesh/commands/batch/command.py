"""Run `kvmesh batch input.jsonl`: check the file, send its requests, keep each result, write them in order."""

import asyncio
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from kvmesh.commands.batch.lines import BatchEntry, BatchRequest, ResultLine, check_input, open_input, request_at
from kvmesh.commands.batch.results import Results
from kvmesh.commands.batch.retrying import OutageWatch
from kvmesh.commands.batch.sending import BatchSender, HttpAnswer, reason_of
from kvmesh.commands.batch.tally import BatchSummary, BatchTally
from kvmesh.commands.http_client import ClientConfig, open_session
from kvmesh.mesh.config import load
from kvmesh.mesh.lifecycle import run, unless_stopped
from kvmesh.protocol.errors import ConfigError

EXIT_SOME_FAILED = 1
EXIT_STOPPED = 130
LINE_EVERY_S = 10.0  # of progress, where there is no terminal


class BatchConfig(ClientConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BATCH_<NAME>`, that over [batch] of `--config`, that over the default."""

    output: Annotated[str, Meta(description="file of the results; default: input.results.jsonl for input.jsonl")] = ""
    model: Annotated[str, Meta(description="model for all requests, instead of the one that each names")] = ""
    concurrency: Annotated[int, Meta(ge=1, le=4096, description="requests that are sent at once, at most")] = 64
    priority: Annotated[
        int, Meta(ge=-100, le=100, description="priority in the router's queue; requests of users have 0")
    ] = -10
    timeout_s: Annotated[float, Meta(gt=0, description="of one try of one request")] = 600.0
    give_up_after_s: Annotated[
        float, Meta(gt=0, description="end the batch when every request has failed for so long")
    ] = 120.0
    json: Annotated[bool, Meta(description="print the summary as one JSON object")] = False


def main(argv: list[str]) -> int:
    path, flags = split_path(argv)
    config = load(
        BatchConfig,
        flags,
        os.environ,
        prefix="KVMESH_BATCH_",
        prog="kvmesh batch input.jsonl",
        description="Send a file of requests in OpenAI's batch format to a running mesh. The output has one result per "
        "request, in the order of the input. After Ctrl-C or a crash the same command continues: it keeps each "
        "successful result and sends the other requests.",
        section="batch",
    )
    if path is None:
        raise ConfigError("there is no input", hint="kvmesh batch input.jsonl")
    entries = check_input(path, config.model)
    output = Path(config.output) if config.output else default_output(path)
    if output.resolve() == path.resolve():
        raise ConfigError(f"{path} is input and output", hint="name another file with --output")
    return run(lambda stop: run_batch(config, path, output, entries, stop))


def split_path(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the input, the first or the last argument, and the flags."""
    if argv and not argv[0].startswith("-"):
        return Path(argv[0]), list(argv[1:])
    if argv and not argv[-1].startswith("-"):
        return Path(argv[-1]), list(argv[:-1])
    return None, list(argv)


def default_output(path: Path) -> Path:
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.results.jsonl")


async def run_batch(
    config: BatchConfig, path: Path, output: Path, entries: Sequence[BatchEntry], stop: asyncio.Event
) -> int:
    """Send what has no result yet. Return the exit code. Raises MeshError if the mesh stays away."""
    results = Results(output)
    tally = BatchTally(len(entries))
    started_s = time.monotonic()
    try:
        tally.kept = results.keep(entries)
        waiting = [entry for entry in entries if entry.id not in results]
        with BatchProgress(tally, Console(stderr=True, highlight=False)) as progress:
            sending = send(config, path, waiting, results, progress)
            done = await unless_stopped(sending, stop)
        if done is None:
            print(f"stopped: {tally.done} of {len(entries)} are done; the same command continues", file=sys.stderr)
            return EXIT_STOPPED
        results.finish(entries)
    finally:
        results.close()
    report(tally.summary(str(output), time.monotonic() - started_s), as_json=config.json)
    return EXIT_SOME_FAILED if tally.failed else 0


async def send(
    config: BatchConfig, path: Path, waiting: Sequence[BatchEntry], results: Results, progress: "BatchProgress"
) -> bool:
    def on_result(result: ResultLine) -> None:
        results.add(result)
        progress.on_result(result)

    async with open_session(config.api_key, config.ca_file, config.timeout_s, config.concurrency) as http:
        outage = OutageWatch(config.give_up_after_s)
        sender = BatchSender(http, config.url, config.priority, outage, on_result, progress.on_retry, random.Random())
        await sender.send_all(requests_of(path, waiting, config.model), min(config.concurrency, len(waiting)))
    return True


def requests_of(path: Path, waiting: Sequence[BatchEntry], model: str) -> Iterator[BatchRequest]:
    """Read each request when its turn comes, so that a large file need not be in memory."""
    with open_input(path) as file:
        for entry in waiting:
            yield request_at(file, entry, model)


class BatchProgress:
    """Show how far a batch is: a bar on a terminal, else a line every 10 s."""

    def __init__(self, tally: BatchTally, console: Console) -> None:
        self._tally = tally
        self._console = console
        self._bar = Progress(
            TextColumn("batch"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = TaskID(0)
        self._said_s = time.monotonic()
        self._trouble = ""

    def __enter__(self) -> "BatchProgress":
        self._bar.start()
        self._task = self._bar.add_task("batch", total=self._tally.requests, completed=self._tally.done, note="")
        if self._tally.kept:
            self._console.print(f"{self._tally.kept} results of an earlier run are kept")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_result(self, result: ResultLine) -> None:
        self._tally.add(result)
        self._trouble = ""
        self._show()

    def on_retry(self, answer: HttpAnswer) -> None:
        self._tally.retries += 1
        self._trouble = f"sending again after: {reason_of(answer)}"
        self._show()

    def _show(self) -> None:
        tally = self._tally
        note = f"{tally.completion_tokens} tokens" + (f", {tally.failed} failed" if tally.failed else "")
        self._bar.update(self._task, completed=tally.done, note=f"{note} {self._trouble}"[:80])
        if not self._console.is_terminal and (now_s := time.monotonic()) - self._said_s >= LINE_EVERY_S:
            self._said_s = now_s
            self._console.print(f"{tally.done} of {tally.requests}, {note} {self._trouble}".rstrip(), soft_wrap=True)


def report(summary: BatchSummary, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(summary).decode())
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    failures = ", ".join(f"{count} x {status}" for status, count in summary.failures.items())
    rate = summary.completion_tokens / summary.duration_s if summary.duration_s else 0.0
    rows = [
        (
            "requests",
            f"{summary.requests}, of which {summary.kept} were done before" if summary.kept else summary.requests,
        ),
        ("succeeded", summary.succeeded + summary.kept),
        ("failed", f"{summary.failed} ({failures})" if failures else 0),
        ("sent again", summary.retries),
        ("prompt", f"{summary.prompt_tokens} tokens, {summary.cached_tokens} of them cached"),
        ("answers", f"{summary.completion_tokens} tokens, {rate:.1f} per second"),
        ("took", f"{summary.duration_s:.1f} s"),
        ("results", summary.output),
    ]
    for name, value in rows:
        table.add_row(name, str(value))
    Console(highlight=False).print(table)
