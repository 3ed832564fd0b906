"""Make the requests of a point: when they come, what they ask, how long the answers are. Only files are read."""

import csv
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from kvmesh.commands.bench.config import ServeBenchConfig
from kvmesh.commands.bench.results import LoadPoint, PointKind
from kvmesh.commands.bench.texts import TextMaker
from kvmesh.protocol.errors import ConfigError
from kvmesh.simulator.mooncake import TraceRow, stream_rows

PER_CLIENT = 8  # requests of a client of a closed loop
LEAST_CLOSED = 32
MOST_SESSIONS = 1_000_000
CHARS_PER_TOKEN = 4  # of a ShareGPT answer, where no tokenizer counts it
_DEFAULT_CONCURRENCY = (1, 4, 16)


class BenchTurn(Struct, frozen=True):
    text: str
    osl_tokens: int


class BenchSession(Struct, frozen=True):
    """Hold a conversation; most have one turn. `at_s` counts only in open loops."""

    at_s: float
    turns: tuple[BenchTurn, ...]


CountTokens = Callable[[str], int]


def points_of(config: ServeBenchConfig) -> list[LoadPoint]:
    """Return the points of the sweep. Raise ConfigError for settings that do not fit together."""
    if config.dataset != "random":
        if not config.trace:
            raise ConfigError(f"--dataset {config.dataset} needs a file", hint="name it with --trace")
        if config.prefix_ratio != (0.0,):
            raise ConfigError("--prefix-ratio is for --dataset random", hint="a trace has its own prefixes")
    elif config.trace:
        raise ConfigError(
            "--trace was given, and --dataset is random", hint="add --dataset mooncake, azure or sharegpt"
        )
    concurrency = config.concurrency
    if not config.rate and not concurrency:
        if config.dataset in ("mooncake", "azure"):
            return [LoadPoint(kind="trace", value=0.0)]
        concurrency = _DEFAULT_CONCURRENCY
    loads: list[tuple[PointKind, float]] = [("rate", value) for value in sorted(config.rate)]
    loads += [("concurrency", float(value)) for value in sorted(concurrency)]
    return [
        LoadPoint(kind=kind, value=value, prefix_ratio=ratio) for ratio in config.prefix_ratio for kind, value in loads
    ]


def sessions_of(
    config: ServeBenchConfig, point: LoadPoint, round_number: int, texts: TextMaker, count_tokens: CountTokens | None
) -> list[BenchSession]:
    """Return the conversations of one point and round, in order of time. Raise ConfigError if there are none."""
    wanted = wanted_sessions(config, point)
    name = f"{point.label} {round_number}"
    match config.dataset:
        case "random":
            sessions = _random(config, point, wanted, name, texts)
        case "sharegpt":
            sessions = list(itertools.islice(_sharegpt(config, count_tokens), wanted))
        case "mooncake" | "azure":
            rows = _azure_rows(Path(config.trace)) if config.trace.endswith(".csv") else stream_rows(Path(config.trace))
            sessions = _from_trace(config, point, rows, wanted, name, texts)
    if not sessions:
        raise ConfigError(f"no request is left for {point.label}", hint="raise --duration-s, --requests or --max-isl")
    if point.kind == "rate":
        times = arrival_times(point.value / _mean_turns(sessions), len(sessions), config.arrival, name, config.seed)
        if config.dataset in ("mooncake", "azure"):
            times = _rescaled([session.at_s for session in sessions], point.value)
        sessions = [msgspec.structs.replace(session, at_s=at) for session, at in zip(sessions, times, strict=True)]
    return sessions


def wanted_sessions(config: ServeBenchConfig, point: LoadPoint) -> int:
    if config.requests:
        return config.requests
    if point.kind == "rate":
        return max(1, round(point.value * config.duration_s / config.turns))
    if point.kind == "trace":
        return MOST_SESSIONS
    return max(LEAST_CLOSED, PER_CLIENT * round(point.value))


def arrival_times(rate: float, count: int, arrival: str, name: str, seed: int) -> list[float]:
    """Return when requests come: a Poisson process, or equal gaps."""
    if arrival == "constant":
        return [number / rate for number in range(count)]
    rng = random.Random(f"arrivals {seed} {name}")
    return list(itertools.accumulate(rng.expovariate(rate) for _ in range(count)))


def _rescaled(times: Sequence[float], rate: float) -> list[float]:
    span_s = times[-1] - times[0]
    factor = (len(times) - 1) / rate / span_s if span_s > 0 else 0.0
    return [(at - times[0]) * factor for at in times]


def _mean_turns(sessions: Sequence[BenchSession]) -> float:
    return sum(len(session.turns) for session in sessions) / len(sessions)


# --- synthetic ---------------------------------------------------------------------------------------------


def _random(config: ServeBenchConfig, point: LoadPoint, count: int, name: str, texts: TextMaker) -> list[BenchSession]:
    rng = random.Random(f"lengths {config.seed} {name}")

    def turn(number: int, turn_number: int) -> BenchTurn:
        isl = min(config.max_isl, length_of(config.isl, config.lengths, config.spread, rng))
        osl = min(config.max_osl, length_of(config.osl, config.lengths, config.spread, rng))
        where = f"{name} {number} {turn_number}"
        if turn_number:
            return BenchTurn(texts.text(where, isl), osl)
        own = texts.first_tokens(isl)
        shared = min(own - 1, point.prefix_ratio * isl)
        if shared < 1:
            return BenchTurn(texts.text(where, own), osl)
        prefix = texts.text(f"{name} prefix {rng.randrange(config.prefix_groups)}", shared)
        return BenchTurn(f"{prefix} {texts.text(where, own - shared)}", osl)

    return [BenchSession(0.0, tuple(turn(number, t) for t in range(config.turns))) for number in range(count)]


def length_of(mean: int, lengths: str, spread: float, rng: random.Random) -> int:
    """Draw a length; its mean is `mean` in each distribution."""
    if lengths == "uniform":
        return max(1, round(mean * (1 + spread * (2 * rng.random() - 1))))
    if lengths == "lognormal":
        return max(1, round(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)))
    return mean


# --- from files --------------------------------------------------------------------------------------------


def _from_trace(
    config: ServeBenchConfig, point: LoadPoint, rows: Iterator[TraceRow], wanted: int, name: str, texts: TextMaker
) -> list[BenchSession]:
    sessions: list[BenchSession] = []
    first_ms = None
    for number, row in enumerate(rows):
        first_ms = row.timestamp if first_ms is None else first_ms
        at_s = (row.timestamp - first_ms) / 1e3
        if len(sessions) >= wanted or (not config.requests and point.kind == "trace" and at_s >= config.duration_s):
            break
        if row.input_length > config.max_isl:
            continue
        turn = BenchTurn(
            _trace_text(row, number, config.trace_block_size, name, texts),
            max(1, min(config.max_osl, row.output_length)),
        )
        sessions.append(BenchSession(at_s, (turn,)))
    return sessions


def _trace_text(row: TraceRow, number: int, block_tokens: int, name: str, texts: TextMaker) -> str:
    """Return a text whose parts are equal where block ids are equal: a round repeats no earlier round's prefix."""
    left = texts.first_tokens(row.input_length)
    parts = []
    for block in row.hash_ids:
        size = min(left, block_tokens)
        if size < 1:
            break
        parts.append(texts.text(f"{name} block {block} {size:.0f}", size))
        left -= size
    if left >= 1 or not parts:
        parts.append(texts.text(f"{name} rest {number}", left))
    return " ".join(parts)


def _azure_rows(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of Azure's own format: TIMESTAMP, ContextTokens, GeneratedTokens."""
    began = None
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                began = at if began is None else began
                yield TraceRow(
                    timestamp=max(0.0, (at - began) * 1e3),
                    input_length=max(1, int(row["ContextTokens"])),
                    output_length=int(row["GeneratedTokens"]),
                    hash_ids=[],
                )
    except (OSError, KeyError, ValueError) as error:
        hint = "a CSV file with TIMESTAMP, ContextTokens and GeneratedTokens, or JSON lines as Mooncake's"
        raise ConfigError(f"{path} is no Azure trace: {error}", hint=hint) from error


class _Said(Struct):
    value: str
    from_: str = msgspec.field(name="from")


class _Conversation(Struct):
    conversations: list[_Said] = []


def _sharegpt(config: ServeBenchConfig, count_tokens: CountTokens | None) -> Iterator[BenchSession]:
    """Yield conversations of a ShareGPT file: a JSON list, or an object a line."""
    try:
        data = Path(config.trace).read_bytes()
        if data.lstrip()[:1] == b"[":
            found = msgspec.json.decode(data, type=list[_Conversation])
        else:
            found = [msgspec.json.decode(line, type=_Conversation) for line in data.splitlines() if line.strip()]
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{config.trace} is no ShareGPT file: {error}", hint='a list of {"conversations": [{"from", "value"}]}'
        ) from error

    def tokens(text: str) -> int:
        return count_tokens(text) if count_tokens else -(-len(text) // CHARS_PER_TOKEN)

    random.Random(f"sharegpt {config.seed}").shuffle(found)
    for conversation in found:
        turns, said = [], conversation.conversations
        for asked, answered in itertools.pairwise(said):
            if asked.from_ in ("human", "user") and answered.from_ in ("gpt", "assistant") and asked.value:
                turns.append(BenchTurn(asked.value, max(1, min(config.max_osl, tokens(answered.value)))))
        if turns and tokens(turns[0].text) <= config.max_isl:
            yield BenchSession(0.0, tuple(turns[: config.turns]))


def merged_body(api: str, model: str, extra: str, *, ignore_eos: bool) -> dict[str, object]:
    """Return the fields that all requests share. Raise ConfigError if `extra` is no JSON object."""
    try:
        more = json.loads(extra)
    except ValueError as error:
        raise ConfigError(f"--extra is no JSON: {error}", hint='give an object, as {"temperature": 0}') from error
    if not isinstance(more, dict):
        raise ConfigError("--extra is no JSON object", hint='give one, as {"temperature": 0}')
    body: dict[str, object] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    return body | ({"ignore_eos": True} if ignore_eos else {}) | more
