"""Have AIPerf send a point's requests, and read what it records of each into our result schema.

AIPerf gets the very requests that our own driver would send, as a file with their times, and writes a record of each.
The figures are computed from those records by the same functions, so only the sender differs. AIPerf counts a request's
times from when it sent the request, not from when the request was due.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from kvmesh.commands.bench.config import ServeBenchConfig
from kvmesh.commands.bench.judging import RunTotals, ServeSlo, completion_rate, offered_rps, point_figures
from kvmesh.commands.bench.reading import CUT, HTTP, TIMEOUT
from kvmesh.commands.bench.results import EndpointFacts, LoadPoint, PointResult, RequestOutcome
from kvmesh.commands.bench.workload import BenchSession, merged_body
from kvmesh.protocol.errors import ConfigError, EngineError

SPARE_S = 120.0  # AIPerf's processes start and end
_SET_BY_AIPERF = ("model", "stream", "stream_options")


class _Amount(Struct):
    value: float | list[float]


class _Metadata(Struct):
    request_start_ns: int
    request_end_ns: int
    was_cancelled: bool = False
    benchmark_phase: str = "profiling"


class _Failure(Struct):
    code: int | None = None
    type: str | None = None
    message: str = ""


class AiperfRecord(Struct):
    """Hold one line of AIPerf's profile_export.jsonl."""

    metadata: _Metadata
    metrics: dict[str, _Amount] = {}
    error: _Failure | None = None


_decoder = msgspec.json.Decoder(AiperfRecord)


def aiperf_version(command: str) -> str:
    """Return AIPerf's version. Raise ConfigError if it is not installed."""
    hint = "pip install aiperf, in an environment of its own, and name its command with --aiperf"
    if shutil.which(command) is None:
        raise ConfigError(f"there is no command {command}", hint=hint)
    try:
        said = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=120, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{command} --version failed: {error}", hint=hint) from error
    return said.strip().splitlines()[-1] if said.strip() else "unknown"


def run_aiperf(
    config: ServeBenchConfig, facts: EndpointFacts, point: LoadPoint, slo: ServeSlo, sessions: Sequence[BenchSession]
) -> PointResult:
    """Return what AIPerf measured. Raise EngineError if it wrote no records."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-aiperf-") as name:
        folder = Path(name)
        asked = folder / "requests.jsonl"
        asked.write_text("".join(f"{row}\n" for row in rows_of(sessions, is_open=point.kind != "concurrency")))
        count = sum(len(session.turns) for session in sessions)
        arguments = arguments_of(config, facts, point, count, asked, folder / "out")
        last_s = max(session.at_s for session in sessions) if point.kind != "concurrency" else config.timeout_s
        env = {**os.environ, "OPENAI_API_KEY": config.api_key} if config.api_key else None
        try:
            done = subprocess.run(
                [config.aiperf, *arguments],
                capture_output=True,
                text=True,
                env=env,
                timeout=last_s + config.timeout_s + SPARE_S,
                check=False,
            )
            records = records_of((folder / "out" / "profile_export.jsonl").read_bytes())
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"AIPerf did not finish: {error}") from error
        if not records:
            raise EngineError(f"AIPerf recorded no request: {(done.stderr or done.stdout)[-600:]}")
    outcomes = outcomes_of(records)
    run = RunTotals(
        rounds=1,
        duration_s=max(outcome.end_s for outcome in outcomes),
        offered_rps=offered_rps(outcomes),
        completion_rate=completion_rate(outcomes),
        generator=None,
    )
    return point_figures(facts.name, point, outcomes, run, slo, config.gpus)


def arguments_of(
    config: ServeBenchConfig, facts: EndpointFacts, point: LoadPoint, count: int, asked: Path, out: Path
) -> list[str]:
    """Return the arguments of AIPerf for a point with `count` requests."""
    common = merged_body(config.api, facts.model, config.extra, ignore_eos=config.ignore_eos)
    extra = {name: value for name, value in common.items() if name not in _SET_BY_AIPERF}
    load = ["--fixed-schedule"]
    if point.kind == "concurrency":
        load = ["--no-fixed-schedule", "--concurrency", f"{point.value:.0f}", "--request-count", str(count)]
    return [
        "profile",
        *("--model", facts.model, "--url", facts.url, "--endpoint-type", config.api, "--streaming"),
        *("--input-file", str(asked), "--custom-dataset-type", "mooncake_trace", *load),
        *("--use-server-token-count", "--use-legacy-max-tokens", "--extra-inputs", json.dumps(extra)),
        *("--tokenizer", config.tokenizer or "builtin", "--random-seed", str(config.seed)),
        *("--request-timeout-seconds", f"{config.timeout_s:g}", "--artifact-dir", str(out), "--ui", "none"),
        *(("--api-key", config.api_key) if config.api_key else ()),
    ]


def rows_of(sessions: Iterable[BenchSession], *, is_open: bool) -> list[str]:
    """Return the lines of AIPerf's request file: one per turn, with a time where the load is open."""
    rows = []
    for number, session in enumerate(sessions):
        for turn_number, turn in enumerate(session.turns):
            row: dict[str, object] = {"text_input": turn.text, "output_length": turn.osl_tokens}
            if len(session.turns) > 1:
                row["session_id"] = f"conversation-{number}"
            if is_open and not turn_number:
                row["timestamp"] = round(session.at_s * 1e3, 3)
            rows.append(json.dumps(row))
    return rows


def records_of(data: bytes) -> list[AiperfRecord]:
    """Return the records of the measured phase. Raise EngineError for what is none."""
    try:
        found = [_decoder.decode(line) for line in data.splitlines() if line.strip()]
    except msgspec.DecodeError as error:
        raise EngineError(f"a record of AIPerf cannot be read: {error}") from error
    return [record for record in found if record.metadata.benchmark_phase == "profiling"]


def outcomes_of(records: Sequence[AiperfRecord]) -> list[RequestOutcome]:
    """Return our records of the same requests, with times from the first one on."""
    began_ns = min((record.metadata.request_start_ns for record in records), default=0)
    return [_outcome(record, began_ns) for record in records]


def _outcome(record: AiperfRecord, began_ns: int) -> RequestOutcome:
    sent_s = (record.metadata.request_start_ns - began_ns) / 1e9
    end_s = (record.metadata.request_end_ns - began_ns) / 1e9
    if record.error is not None or record.metadata.was_cancelled:
        failure, detail = _failure(record.error)
        return RequestOutcome(due_s=sent_s, sent_s=sent_s, end_s=end_s, failure=failure, detail=detail)

    def amount(name: str) -> float | None:
        found = record.metrics.get(name)
        return None if found is None or isinstance(found.value, list) else found.value

    gaps = record.metrics.get("inter_chunk_latency")
    gaps_s = tuple(gap / 1e3 for gap in gaps.value) if gaps is not None and isinstance(gaps.value, list) else ()
    usage = amount("usage_completion_tokens")
    events = len(gaps_s) + 1
    tokens = amount("output_sequence_length") if usage is None else usage
    first_s = sent_s + (amount("time_to_first_token") or 0.0) / 1e3
    cached = amount("usage_prompt_cache_read_tokens")
    return RequestOutcome(
        due_s=sent_s,
        sent_s=sent_s,
        end_s=sent_s + (amount("request_latency") or 1e3 * (end_s - sent_s)) / 1e3,
        first_s=first_s,
        last_s=first_s + sum(gaps_s),
        gaps_s=gaps_s,
        events=events,
        tokens=round(tokens or events),
        prompt_tokens=round(amount("usage_prompt_tokens") or amount("input_sequence_length") or 0),
        cached_tokens=None if cached is None else round(cached),
        has_usage=usage is not None,
    )


def _failure(error: _Failure | None) -> tuple[str, str]:
    """Return the kind of a failure and what AIPerf says of it."""
    if error is None:
        return CUT, "AIPerf cancelled it"
    kind = f"{HTTP} {error.code}" if error.code and 400 <= error.code < 600 else CUT
    if "imeout" in (error.type or ""):
        kind = TIMEOUT
    return kind, error.message[:200]
