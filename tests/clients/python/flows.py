"""Run the flows of one client and print a line of JSON for each. Needs nothing beyond the standard library.

A script makes one `Flows`, gives it a function for each flow, names the flows that the client lacks, and calls `run`.
The helpers below ask the mesh over plain HTTP: what a client gets is compared with what they get.
"""

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

URL = os.environ["KVMESH_URL"]
SLOW_URL = os.environ["KVMESH_SLOW_URL"]
KEY = os.environ["KVMESH_API_KEY"]
MODEL = "tiny"
IDLE_WITHIN_S = 5.0
QUESTION = "Tell me about a garden."
FOLLOW_UP = "And what grows there?"
ABOUT_ANNA = "Anna is 7 years old. Give me the name and age as JSON."
WEATHER = "What is the weather in Paris?"
TOKENS = 24
WEATHER_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER_ABOUT = "Return the weather in a city."
SUNNY = '{"weather": "sunny", "temperature": 21}'
TOOL_TOKENS = 200
OBJECT_TOKENS = 200


class Flows:
    """The flows of one client. `package`: the one whose version the table shows."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._flows: dict[str, Callable[[], Any]] = {}
        self._lacks: dict[str, str] = {}

    def flow(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Register a function, plain or `async`, as the flow of its name. What it returns becomes the detail."""
        self._flows[function.__name__] = function
        return function

    def lacks(self, reason: str, *flows: str) -> None:
        self._lacks |= dict.fromkeys(flows, reason)

    def run(self) -> None:
        """Run the flows, or those that KVMESH_FLOWS names (`chat,stream`)."""
        say(version=version(self._package))
        chosen = os.environ.get("KVMESH_FLOWS")
        for name, function in self._flows.items():
            if not chosen or name in chosen.split(","):
                run_flow(name, function)
        for name, reason in self._lacks.items():
            say(flow=name, lacks=reason)


def run_flow(name: str, function: Callable[[], Any]) -> None:
    began = time.monotonic()
    try:
        detail = function()
        if inspect.iscoroutine(detail):
            detail = asyncio.run(detail)
    except Exception as error:
        traceback.print_exc()
        say(flow=name, ok=False, s=round(time.monotonic() - began, 3), detail=told(error))
    else:
        say(flow=name, ok=True, s=round(time.monotonic() - began, 3), detail=str(detail or "")[:200])


def told(error: BaseException) -> str:
    """Return the error and the last line of the script that it passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == sys.argv[0]]
    where = f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:1500]}{where}"


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


# --- checks -------------------------------------------------------------------------------------------


def equal(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what}: found {found!r}, expected {expected!r}")


def check(condition: Any, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def check_error(error: Exception, kind: type[Exception], *parts: str) -> None:
    """Check the type of a client's error, and that it shows the mesh's message."""
    check(isinstance(error, kind), f"{type(error).__name__} is no {kind.__name__}: {error}")
    for part in parts:
        check(part in str(error), f"{part!r} is not in {error}")


def error_of(call: Callable[[], Any]) -> Exception:
    """Return what a call raises."""
    try:
        answer = call()
    except Exception as error:
        return error
    raise AssertionError(f"nothing was raised, and the answer is {answer!r}")


# --- what the mesh says over plain HTTP ---------------------------------------------------------------


def asked(path: str, body: dict[str, Any], url: str = URL) -> dict[str, Any]:
    """Return the reply to a POST."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}", "x-api-key": KEY}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def chat_text(*contents: str, **fields: Any) -> str:
    """Return the answer to messages of a user and of the assistant, in turns, at temperature 0."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": TOKENS, **fields}
    return asked("/v1/chat/completions", body)["choices"][0]["message"]["content"]


def in_flight(url: str = SLOW_URL) -> int:
    """Return how many requests a mesh has in progress."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        for line in response.read().decode().splitlines():
            if line.partition("{")[0].split(" ")[0] == "kvmesh_frontend_inflight":
                return int(float(line.rsplit(" ", 1)[1]))
    raise AssertionError("the mesh has no metric kvmesh_frontend_inflight")


def check_running() -> None:
    """Check that the slow mesh answers a request now, before it is cancelled."""
    check(in_flight() > 0, "the slow mesh has nothing in progress while a stream is open")


def check_cancelled() -> str:
    """Wait until the slow mesh has nothing in progress. Its answers take much longer than that by themselves."""
    began = time.monotonic()
    while (count := in_flight()) > 0:
        check(time.monotonic() - began < IDLE_WITHIN_S, f"{count} in progress {IDLE_WITHIN_S} s after the cancel")
        time.sleep(0.02)
    return f"idle after {time.monotonic() - began:.2f} s"
