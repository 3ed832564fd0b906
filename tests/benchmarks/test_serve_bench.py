"""`kvmesh bench serve` against servers that misbehave by script."""

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from kvmesh.commands.bench.aiperf import outcomes_of, records_of, rows_of
from kvmesh.commands.bench.checking import check_endpoints, missing, named_endpoints
from kvmesh.commands.bench.command import main
from kvmesh.commands.bench.config import ServeBenchConfig
from kvmesh.commands.bench.manifest import without_key
from kvmesh.commands.bench.results import LoadPoint
from kvmesh.commands.bench.sending import SendingPlan, SendingResult, drive
from kvmesh.commands.bench.texts import TextMaker, plain_words
from kvmesh.commands.bench.workload import BenchSession, BenchTurn, points_of, sessions_of
from kvmesh.protocol.errors import ConfigError
from tests.support.scripted_server import ServerScript, scripted_server

TEXTS = TextMaker(plain_words(), 1.0, 0.0, 1)


async def ask(script: ServerScript, *, count: int = 3, clients: int = 0, timeout_s: float = 30.0) -> SendingResult:
    async with scripted_server(script) as url:
        return await drive(plan(url, [one(at_s=0.01 * number) for number in range(count)], clients, timeout_s))


def plan(url: str, sessions: list[BenchSession], clients: int = 0, timeout_s: float = 30.0) -> SendingPlan:
    common: dict[str, object] = {"model": "tiny", "stream": True}
    return SendingPlan(
        url=url,
        api="chat",
        api_key="",
        common=common,
        sessions=sessions,
        clients=clients,
        think_s=0.0,
        timeout_s=timeout_s,
    )


def one(text: str = "say it", tokens: int = 6, at_s: float = 0.0) -> BenchSession:
    return BenchSession(at_s, (BenchTurn(text, tokens),))


@pytest.mark.parametrize("clients", [0, 2])
async def test_answers_are_counted_as_the_server_gave_them(clients: int) -> None:
    sent = await ask(ServerScript(), clients=clients)
    assert [(o.tokens, o.events, o.prompt_tokens, o.failure) for o in sent.outcomes] == [(6, 6, 12, "")] * 3
    assert all(o.due_s <= o.first_s <= o.last_s <= o.end_s for o in sent.outcomes)
    assert sent.generator.cpu_s > 0


async def test_a_stall_is_part_of_the_time_to_the_first_token() -> None:
    sent = await ask(ServerScript(stalls_before_first_s=0.2))
    assert all(o.first_s - o.due_s >= 0.2 for o in sent.outcomes)
    assert all(o.last_s - o.first_s < o.first_s - o.due_s for o in sent.outcomes)


async def test_an_open_loop_sends_although_nothing_comes_back() -> None:
    sent = await ask(ServerScript(hangs_after=2), count=5, timeout_s=0.5)
    assert [o.failure for o in sent.outcomes] == ["timeout"] * 5
    assert max(o.due_s for o in sent.outcomes) - min(o.due_s for o in sent.outcomes) == pytest.approx(0.04, abs=0.005)
    assert max(o.sent_s for o in sent.outcomes) < min(o.end_s for o in sent.outcomes), "none waited for another's end"


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        (ServerScript(status=503), "http 503"),
        (ServerScript(cuts_after=2), "cut short"),
        (ServerScript(fails_after=2), "error event"),
    ],
)
async def test_failures_are_told_apart(script: ServerScript, failure: str) -> None:
    sent = await ask(script)
    assert [o.failure for o in sent.outcomes] == [failure] * 3


async def test_several_tokens_in_an_event_are_counted_by_usage() -> None:
    [first, *_] = (await ask(ServerScript(tokens_per_event=4))).outcomes
    assert (first.tokens, first.events, len(first.gaps_s)) == (6, 2, 1)


async def test_without_usage_events_are_counted() -> None:
    [first, *_] = (await ask(ServerScript(has_usage=False))).outcomes
    assert (first.tokens, first.has_usage, first.prompt_tokens) == (6, False, 0)


async def test_a_kept_connection_that_has_closed_costs_no_request() -> None:
    sent = await ask(ServerScript(closes_kept=True), count=6, clients=1)
    assert [o.failure for o in sent.outcomes] == [""] * 6


async def test_nobody_at_the_address_is_said() -> None:
    sent = await drive(plan("http://127.0.0.1:9", [one()]))
    assert sent.outcomes[0].failure == "no connection"


async def test_a_conversation_sends_its_history() -> None:
    script = ServerScript()
    async with scripted_server(script) as url:
        await drive(plan(url, [BenchSession(0.0, (BenchTurn("first", 2), BenchTurn("second", 3)))]))
    said = [[(m["role"], m["content"]) for m in body["messages"]] for body in script.bodies]
    assert said == [
        [("user", "first")],
        [("user", "first"), ("assistant", " word word"), ("user", "second")],
    ]


# --- checks -------------------------------------------------------------------------------------------------


async def checks_of(script: ServerScript, **settings: object) -> tuple[dict[str, str], list[str], float]:
    async with scripted_server(script) as url:
        found = await check_endpoints(ServeBenchConfig(endpoints=(url,), **settings), None)
    return found[0].checks, missing(found), found[0].template_tokens


async def test_a_sound_endpoint_passes_all_checks() -> None:
    checks, lacking, template_tokens = await checks_of(ServerScript())
    assert set(checks.values()) == {"ok"} and not lacking and template_tokens == 10


@pytest.mark.parametrize(
    ("script", "check", "is_fatal"),
    [
        (ServerScript(models=("other", "third")), "model listed", True),
        (ServerScript(status=401), "answers", True),
        (ServerScript(streams=False), "streams", True),
        (ServerScript(has_usage=False), "usage", False),
        (ServerScript(obeys_length=False, tokens_per_event=1), "answer length", False),
    ],
)
async def test_a_lack_is_found_before_the_run(script: ServerScript, check: str, is_fatal: bool) -> None:
    checks, lacking, _ = await checks_of(script)
    assert checks[check] != "ok" and bool(lacking) == (is_fatal or not script.obeys_length)


async def test_nobody_there_is_found_before_the_run() -> None:
    found = await check_endpoints(ServeBenchConfig(endpoints=("http://127.0.0.1:9",)), None)
    assert missing(found)[0].startswith("endpoint: reachable")


def test_endpoints_have_names_of_their_own() -> None:
    assert named_endpoints(["a=http://x:1/v1", "http://y:2"]) == {"a": "http://x:1", "endpoint-2": "http://y:2"}
    for wrong in (["a=http://x", "a=http://y"], ["x:1"]):
        with pytest.raises(ConfigError, match="names no endpoint"):
            named_endpoints(wrong)


# --- workloads ----------------------------------------------------------------------------------------------


def sessions(point: LoadPoint | None = None, **settings: object) -> list[BenchSession]:
    config = ServeBenchConfig(**settings)
    return sessions_of(config, point or points_of(config)[0], 0, TEXTS, None)


def test_equal_seeds_give_equal_requests() -> None:
    assert sessions(rate=(5.0,), seed=3) == sessions(rate=(5.0,), seed=3) != sessions(rate=(5.0,), seed=4)


@pytest.mark.parametrize("lengths", ["uniform", "lognormal"])
def test_lengths_have_the_mean_asked_for(lengths: str) -> None:
    found = sessions(concurrency=(1,), requests=2000, isl=100, osl=50, lengths=lengths)
    sizes = [len(s.turns[0].text.split()) for s in found]
    assert sum(sizes) / len(sizes) == pytest.approx(100, rel=0.05)
    assert len(set(sizes)) > 20
    assert sum(s.turns[0].osl_tokens for s in found) / 2000 == pytest.approx(50, rel=0.05)


def test_a_rate_has_poisson_arrivals_of_that_mean() -> None:
    found = sessions(rate=(20.0,), requests=2000, isl=8)
    assert found[-1].at_s == pytest.approx(100, rel=0.1)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(found)]
    assert sum(gap > 0.05 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.05)
    even = sessions(rate=(20.0,), requests=4, isl=8, arrival="constant")
    assert [s.at_s for s in even] == pytest.approx([0.0, 0.05, 0.1, 0.15])


def test_a_prefix_ratio_is_shared_within_groups() -> None:
    found = sessions(concurrency=(1,), requests=40, isl=100, prefix_ratio=(0.75,), prefix_groups=2)
    prefixes = {" ".join(s.turns[0].text.split()[:75]) for s in found}
    assert len(prefixes) == 2 and len({s.turns[0].text for s in found}) == 40
    assert {len(s.turns[0].text.split()) for s in found} == {100}


def test_a_mooncake_trace_keeps_times_lengths_and_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 5000, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 6500, "input_length": 520, "output_length": 0, "hash_ids": [1, 3]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    found = sessions(dataset="mooncake", trace=str(trace))
    words = [s.turns[0].text.split() for s in found]
    assert [s.at_s for s in found] == [0.0, 1.5] and [len(w) for w in words] == [700, 520]
    assert words[0][:512] == words[1][:512] and [s.turns[0].osl_tokens for s in found] == [3, 1]
    faster = sessions(LoadPoint(kind="rate", value=4.0), dataset="mooncake", trace=str(trace), rate=(4.0,))
    assert [s.at_s for s in faster] == [0.0, 0.25]


def test_an_azure_trace_is_read_as_it_is_published(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    found = sessions(dataset="azure", trace=str(trace))
    assert [round(s.at_s, 3) for s in found] == [0.0, 4.315]
    assert [(len(s.turns[0].text.split()), s.turns[0].osl_tokens) for s in found] == [(374, 44), (396, 109)]


def test_sharegpt_conversations_keep_their_turns(tmp_path: Path) -> None:
    said = [("human", "hello"), ("gpt", "x" * 40), ("human", "more"), ("gpt", "y" * 8), ("human", "unanswered")]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"id": "1", "conversations": [{"from": f, "value": v} for f, v in said]}]))
    [found] = sessions(dataset="sharegpt", trace=str(file), turns=5)
    assert [(t.text, t.osl_tokens) for t in found.turns] == [("hello", 10), ("more", 2)]


@pytest.mark.parametrize(
    "settings",
    [
        {"dataset": "mooncake"},
        {"trace": "x"},
        {"dataset": "azure", "trace": "x", "prefix_ratio": (0.5,)},
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        points_of(ServeBenchConfig(**settings))


# --- AIPerf -------------------------------------------------------------------------------------------------


def test_aiperf_gets_our_requests_at_our_times() -> None:
    asked = [one("a b", 4, 0.25), BenchSession(1.0, (BenchTurn("c", 1), BenchTurn("d", 2)))]
    rows = [json.loads(row) for row in rows_of(asked, is_open=True)]
    assert rows[0] == {"text_input": "a b", "output_length": 4, "timestamp": 250.0}
    assert [row.get("session_id") for row in rows] == [None, "conversation-1", "conversation-1"]
    assert "timestamp" not in rows[2]


def test_records_of_aiperf_become_our_outcomes() -> None:
    def record(start_ns: int, **more: object) -> bytes:
        return json.dumps(
            {"metadata": {"request_start_ns": start_ns, "request_end_ns": start_ns + 10**9}, **more}
        ).encode()

    metrics = {
        "time_to_first_token": {"value": 100.0, "unit": "ms"},
        "inter_chunk_latency": {"value": [10.0, 30.0], "unit": "ms"},
        "request_latency": {"value": 150.0, "unit": "ms"},
        "usage_completion_tokens": {"value": 3, "unit": "tokens"},
        "usage_prompt_tokens": {"value": 12, "unit": "tokens"},
    }
    lines = [record(10**9, metrics=metrics), record(2 * 10**9, error={"code": 503, "message": "full"})]
    good, bad = outcomes_of(records_of(b"\n".join(lines)))
    assert (good.first_s, good.last_s, good.end_s) == pytest.approx((0.1, 0.14, 0.15))
    assert (good.tokens, good.events, good.prompt_tokens, good.has_usage) == (3, 3, 12, True)
    assert (bad.sent_s, bad.failure, bad.detail) == (1.0, "http 503", "full")


def test_a_key_is_not_written_down() -> None:
    assert without_key(["--api-key", "k1", "--api-key=k2", "--isl", "4"]) == [
        "--api-key",
        "...",
        "--api-key=...",
        "--isl",
        "4",
    ]


# --- the command --------------------------------------------------------------------------------------------


async def test_a_run_writes_tables_json_and_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with scripted_server(ServerScript()) as first, scripted_server(ServerScript(tokens_per_event=2)) as second:
        arguments = [f"--endpoints=a={first},b={second}", "--rate=50", "--requests=5", "--isl=20", "--osl=6"]
        code = await asyncio.to_thread(
            main, [*arguments, "--warmup=1", "--no-png", f"--out={tmp_path}", "--json", "--api-key=secret"]
        )
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert code == 0 and [p["endpoint"] for p in report["points"]] == ["a", "b"]
    assert [(p["completed"], p["osl_tokens"], p["isl_tokens"]) for p in report["points"]] == [(5, 6.0, 20.0)] * 2
    assert report["points"][1]["tokens_per_event"] == 2
    assert json.loads((tmp_path / "report.json").read_bytes())["manifest"]["seed"] == 1
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page and "<script" not in page and "secret" not in page + json.dumps(report)


async def test_an_endpoint_that_lacks_something_is_not_loaded() -> None:
    script = ServerScript(models=("other", "third"))
    async with scripted_server(script) as url:
        assert await asyncio.to_thread(main, [f"--endpoints={url}", "--requests=10000"]) == 3
    assert not script.bodies
