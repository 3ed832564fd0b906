"""Run the flows of the command `llm`, with the mesh in its extra-openai-models.yaml."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from flows import (
    ABOUT_ANNA,
    FOLLOW_UP,
    KEY,
    MODEL,
    OBJECT_TOKENS,
    QUESTION,
    SLOW_URL,
    SUNNY,
    TOKENS,
    TOOL_TOKENS,
    URL,
    WEATHER,
    WEATHER_ABOUT,
    Flows,
    chat_text,
    check,
    check_cancelled,
    check_running,
    equal,
)

flows = Flows("llm")
FOLDER = Path.home() / "llm"
FOLDER.mkdir(exist_ok=True)
os.environ["LLM_USER_PATH"] = str(FOLDER)
LLM = [str(Path(sys.executable).parent / "llm")]
GREEDY = ["-o", "temperature", "0", "-o", "max_tokens", str(TOKENS)]
TOOL = f'def get_weather(city: str) -> str:\n    """{WEATHER_ABOUT}"""\n    return {SUNNY!r}\n'
(FOLDER / "keys.json").write_text(json.dumps({"kvmesh": KEY}))
(FOLDER / "extra-openai-models.yaml").write_text(
    "".join(
        f"- model_id: {name}\n  model_name: {model}\n  api_base: {url}/v1\n  api_key_name: kvmesh\n"
        f"  supports_tools: true\n  supports_schema: true\n"
        for name, model, url in (("mesh", MODEL, URL), ("slow", MODEL, SLOW_URL), ("missing", "nonsense", URL))
    )
)


def llm(*arguments: str) -> str:
    """Return what the command prints; raise its stderr if it fails."""
    done = subprocess.run([*LLM, *arguments], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    check(done.returncode == 0, f"llm {' '.join(arguments)}: {done.stderr[-1500:]}")
    return done.stdout.removesuffix("\n")


def failure(*arguments: str) -> str:
    """Return the stderr of a command that has to fail."""
    done = subprocess.run([*LLM, *arguments], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    equal(done.returncode, 1, "the exit code")
    return done.stderr


@flows.flow
def chat():
    equal(llm("-m", "mesh", "--no-stream", *GREEDY, QUESTION), chat_text(QUESTION), "the answer")


@flows.flow
def stream():
    equal(llm("-m", "mesh", *GREEDY, QUESTION), chat_text(QUESTION), "the streamed answer")


@flows.flow
def second_turn():
    first = llm("-m", "mesh", *GREEDY, QUESTION)
    equal(llm("-c", *GREEDY, FOLLOW_UP), chat_text(QUESTION, first, FOLLOW_UP), "the second answer")


@flows.flow
def tools():
    options = ["-o", "temperature", "0", "-o", "max_tokens", str(TOOL_TOKENS)]
    text = llm("-m", "mesh", "--functions", TOOL, *options, WEATHER)
    responses = json.loads(llm("logs", "-c", "--json"))
    called = [call["name"] for one in responses for call in one["tool_calls"]]
    equal(called, ["get_weather"], f"the calls ({text!r})")
    check(text, "no text at the end")
    return text


@flows.flow
def structured():
    options = ["-o", "temperature", "0", "-o", "max_tokens", str(OBJECT_TOKENS)]
    person = json.loads(llm("-m", "mesh", "--schema", "name, age int", *options, ABOUT_ANNA))
    equal((type(person["name"]), type(person["age"])), (str, int), "the object, which may have other fields")


@flows.flow
def usage():
    llm("-m", "mesh", *GREEDY, QUESTION)
    [logged] = json.loads(llm("logs", "-n", "1", "--json"))
    check(logged["input_tokens"] > 0, "no input tokens")
    equal(logged["output_tokens"], TOKENS, "the output tokens")


@flows.flow
def error():
    check("does not exist" in failure("-m", "missing", QUESTION), "the command does not say that the model is missing")


@flows.flow
def cancel():
    process = subprocess.Popen(
        [*LLM, "-m", "slow", "-o", "max_tokens", "1000", QUESTION], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        check(process.stdout.read(1), "no output")
        check_running()
        process.send_signal(signal.SIGINT)
        said = check_cancelled()
        began = time.monotonic()
        process.wait(20)
        return f"{said}, and the command ended {time.monotonic() - began:.1f} s later"
    finally:
        process.kill()  # a request that goes on would fail the other clients' cancel too


flows.run()
