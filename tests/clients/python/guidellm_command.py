"""Run the flows of GuideLLM: small loads of synthetic prompts, judged by the report that it writes."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from flows import KEY, MODEL, SLOW_URL, URL, Flows, check, check_cancelled, equal

flows = Flows("guidellm")
GUIDELLM = str(Path(sys.executable).parent / "guidellm")
TOKENIZER = Path(__file__).resolve().parents[3] / "cluster" / "tiny_model" / "checkpoint"
TOKENS = 16
REQUESTS = 6  # of very few it says sometimes that it has measured nothing
os.environ["GUIDELLM__MAX_WORKER_PROCESSES"] = "1"


def run(data: str, limit: str, url: str = URL, model: str = MODEL, **backend: str):
    """Run a load of two requests at once. Return the report's requests, and what the command said if there are none."""
    report = Path.home() / "report.json"
    report.unlink(missing_ok=True)
    fields = {"target": url, "model": model, "api_key": KEY, **backend}
    options = {
        "backend": ",".join(["kind=openai_http", *(f"{name}={value}" for name, value in fields.items())]),
        "tokenizer": f"kind=hf_auto,model={TOKENIZER}",
        "data": f"kind=synthetic_text,prompt_tokens=32,{data}",
        "profile": "kind=concurrent,streams=2",
        "constraint": limit,
        "output": f"kind=json,path={report}",
    }
    argv = [GUIDELLM, "run", "--disable-console", *(word for name in options for word in (f"--{name}", options[name]))]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=150)
    if not report.exists():
        return None, done.stdout + done.stderr
    return json.loads(report.read_text())["benchmarks"][0]["requests"], ""


def successful(count: int, data: str, **backend: str):
    """Return the requests of a load, none of which may fail."""
    found, said = run(data, f"kind=max_requests,count={count}", **backend)
    check(found, f"no report: {said[-1500:]}")
    equal((len(found["successful"]), found["errored"]), (count, []), "the requests and the errors")
    return found["successful"]


@cache
def talk():
    """Return the requests of two streamed conversations of two turns each."""
    return successful(4, f"output_tokens={TOKENS},turns=2")


@flows.flow
def chat():
    for one in successful(REQUESTS, f"output_tokens={TOKENS}", stream="false"):
        check(one["output"], "an empty answer")
        equal(one["output_metrics"]["text_tokens"], TOKENS, "the tokens of an answer")


@flows.flow
def stream():
    for one in talk():
        check(one["output"], "an empty answer")
        check(one["info"]["timings"]["token_iterations"] > 1, "a stream of one piece")


@flows.flow
def second_turn():
    seconds = [one for one in talk() if one["info"]["turn_index"] == 1]
    equal(len(seconds), 2, "the second turns")
    for second in seconds:
        [first] = [
            one
            for one in talk()
            if one["info"]["conversation_id"] == second["info"]["conversation_id"] and one["info"]["turn_index"] == 0
        ]
        check(first["output"] in json.loads(second["request_args"])["body"]["messages"][1]["content"], "no history")
        check(second["input_metrics"]["cached_tokens"] > 0, "no cached tokens in the second turn")


@flows.flow
def tools():
    """Let a tool be called in the first turn; GuideLLM demands it and sends a result of its own."""
    found = successful(4, "output_tokens=200,turns=2,tool_call_turns=1")
    called = [one["output_metrics"]["tool_call_count"] for one in found if one["tool_calls"]]
    equal(len(called), 2, "the answers that call")
    check(all(called), f"the numbers of calls: {called}")


@flows.flow
def usage():
    for one in talk():
        check(one["input_metrics"]["text_tokens"] >= 32, "too few prompt tokens")
        equal(one["output_metrics"]["text_tokens"], TOKENS, "the tokens of an answer")


@flows.flow
def error():
    found, said = run(f"output_tokens={TOKENS}", "kind=max_requests,count=2", model="nonsense")
    shown = said if found is None else " ".join(str(one["info"]["error"]) for one in found["errored"])
    check("404" in shown, f"no 404 is reported: {shown[-1500:]}")


@flows.flow
def cancel():
    found, said = run("output_tokens=1000", "kind=max_duration,seconds=2", url=SLOW_URL)
    check(found and not found["successful"], f"requests that ended: {said[-1500:]}")
    equal(len(found["incomplete"]), 2, "the requests that were left")
    return check_cancelled()


@flows.flow
def completions():
    successful(REQUESTS, f"output_tokens={TOKENS}", request_format="/v1/completions")


@flows.flow
def responses():
    successful(REQUESTS, f"output_tokens={TOKENS}", request_format="/v1/responses")


flows.lacks("its load has no schemas", "structured")
flows.run()
