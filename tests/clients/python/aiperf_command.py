"""Run the flows of AIPerf: small loads of synthetic prompts, judged by the records that it exports."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from flows import KEY, MODEL, SLOW_URL, URL, Flows, check, check_cancelled, equal

flows = Flows("aiperf")
AIPERF = str(Path(sys.executable).parent / "aiperf")
TOKENIZER = str(Path(__file__).resolve().parents[3] / "cluster" / "tiny_model" / "checkpoint")
TOKENS = 16
REQUESTS = 4
LIMITS = ["--isl", "32", "--concurrency", "2", "--random-seed", "7"]
FULL = ("--extra-inputs", "ignore_eos:true")  # else an answer may end with its first token
COUNTED = "--use-server-token-count"
QUIET = ["--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"]
ONLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # with these it takes a folder for the name of a repository


@cache
def records(*options: str, url: str = URL, model: str = MODEL, tokens: int = TOKENS):
    """Run a load and return the record of each request."""
    folder = Path.home() / f"run-{abs(hash((options, url, model)))}"
    argv = [AIPERF, "profile", "-m", model, "--url", url, "--api-key", KEY, "--tokenizer", TOKENIZER, *LIMITS, *QUIET]
    argv += ["--osl", str(tokens), "--output-artifact-dir", str(folder), *options]
    if "--conversation-num" not in options:
        argv += ["--request-count", str(REQUESTS)]
    variables = {name: value for name, value in os.environ.items() if name not in ONLINE}
    done = subprocess.run(argv, capture_output=True, text=True, env=variables, stdin=subprocess.DEVNULL, timeout=150)
    exported = folder / "profile_export.jsonl"
    check(exported.exists(), f"aiperf exported nothing: {done.stdout[-1500:]} {done.stderr[-500:]}")
    return [json.loads(line) for line in exported.read_text().splitlines()]


def metric(record, name: str) -> float:
    return record["metrics"][name]["value"]


def talk():
    """Return the records of two streamed conversations of two turns each."""
    return records(COUNTED, *FULL, "--streaming", "--conversation-num", "2", "--conversation-turn-mean", "2")


def check_complete(found, count: int = REQUESTS) -> None:
    equal(
        (len(found), [one["error"] for one in found if one.get("error")]), (count, []), "the records and their errors"
    )
    check(all(0 < metric(one, "output_sequence_length") <= TOKENS for one in found), "an answer of a wrong length")


@flows.flow
def chat():
    check_complete(records(COUNTED, *FULL))


@flows.flow
def stream():
    found = talk()
    check_complete(found)
    check(all(metric(one, "time_to_first_token") < metric(one, "request_latency") for one in found), "no stream")


@flows.flow
def second_turn():
    seconds = [one for one in talk() if one["metadata"]["turn_index"] == 1]
    equal(len(seconds), 2, "the second turns")
    check(all(metric(one, "usage_prompt_cache_read_tokens") > 0 for one in seconds), "no cached tokens in second turns")


@flows.flow
def usage():
    for one in talk():
        check(metric(one, "usage_prompt_tokens") >= 32, "too few prompt tokens")
        equal(metric(one, "usage_completion_tokens"), metric(one, "output_sequence_length"), "completion tokens")


@flows.flow
def error():
    found = records(model="nonsense")
    errors = [one["error"] for one in found]
    equal({one["code"] for one in errors}, {404}, f"the codes of the errors ({errors[:1]})")
    check("does not exist" in str(errors[0]), f"the error: {errors[0]}")


@flows.flow
def cancel():
    options = ["--streaming", "--request-cancellation-rate", "100", "--request-cancellation-delay", "0.5"]
    found = records(*options, *FULL, url=SLOW_URL, tokens=1000)
    equal({one["metadata"]["was_cancelled"] for one in found}, {True}, "whether the requests were cancelled")
    return check_cancelled()


@flows.flow
def completions():
    check_complete(records(COUNTED, *FULL, "--endpoint-type", "completions", "--streaming"))


@flows.flow
def responses():
    """Count the tokens here: AIPerf reads no usage from a response that its limit cut off."""
    check_complete(records("--endpoint-type", "responses", "--streaming"))


@flows.flow
def messages():
    check_complete(records(COUNTED, "--endpoint-type", "messages", "--streaming"))


flows.lacks("its load has no tools and no schemas", "tools", "structured")
flows.run()
