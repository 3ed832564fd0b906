"""Serve a frontend whose model follows orders: an agent with a long prompt gets an answer that shows what was read.

The tiny model reads 2,048 tokens; the prompts of coding agents have ten times as many. This model reads everything. It
follows the last order that a user has given:

- `say "words"`: it answers the words. `say "words" slowly`: again and again, for a minute.
- `run "command"`: it calls the first tool that takes a command. After the result it answers `it printed: ` and that
  result.
- `recall "words"`: it says whether it has said the words before.
- `fill in the form`: it answers with an instance of the schema that the answer is held to, or calls the tool
  `StructuredOutput` with an instance of its schema.

Without an order it says that there was none. A gap to fill it answers with what stands at both sides.
"""

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer

from kvmesh.frontend.generator import DeltaConsumer, Hints, Trace
from kvmesh.frontend.http import FrontendApi, HttpSettings
from kvmesh.frontend.models import ModelRegistry
from kvmesh.mesh.http.server import listening
from kvmesh.protocol.messages import Delta, FinishReason, GenerateRequest, Guide, unpack_tokens
from tests.frontend import tiny
from tests.frontend.serving import BACKEND, END, TEMPLATE, able_card, ids
from tests.support.generator import ScriptedGenerator, give

CONTEXT_TOKENS = 1_000_000
PIECE_TOKENS = 4  # of one delta
SLOW_S = 0.05  # between two words that are said slowly
NO_ORDER = "There was no order."
NO_TOOL = "No tool takes a command."
FORM_TOOL = "StructuredOutput"
_ORDER = re.compile(r'\b(say|run|recall) \\?"([^"\\\n]+)\\?"( slowly)?|\b(fill) in the form')
_GAP = re.compile(r"<\|fim_prefix\|>(.*)<\|fim_suffix\|>(.*)<\|fim_middle\|>", re.DOTALL)
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_EXAMPLES: dict[str, Any] = {"string": "x", "integer": 1, "number": 1, "boolean": True, "array": [], "null": None}


def reading() -> Tokenizer:
    """Return the tokenizer of most tests, with signs for a gap in a text."""
    tokenizer = Tokenizer.from_str(BACKEND.to_str())
    tokenizer.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    return tokenizer


READS = reading()


class ObedientModel(ScriptedGenerator):
    """Answers a prompt as the orders in it say."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[str] = []

    async def generate(
        self, request: GenerateRequest, hints: Hints, trace: Trace, deadline: float, consumer: DeltaConsumer
    ) -> None:
        prompt = READS.decode(list(unpack_tokens(request.prompt)), skip_special_tokens=False)
        self.prompts.append(prompt)
        text, is_slow = answer_to(prompt, request.guide)
        left = request.stop.max_tokens
        tokens = ids(text)[:left]
        for start in range(0, len(tokens), PIECE_TOKENS):
            while consumer.is_full:
                await consumer.until_ready()
            give(consumer, Delta(tokens[start : start + PIECE_TOKENS]))
            if consumer.is_done:
                return
            await asyncio.sleep(SLOW_S if is_slow else 0)
        if len(tokens) < left:
            give(consumer, Delta((END,), FinishReason.STOP, stop_token=END))
        else:
            give(consumer, Delta((), FinishReason.LENGTH))


def answer_to(prompt: str, guide: Guide | None) -> tuple[str, bool]:
    """Return what the model answers, and whether it takes its time."""
    if gap := _GAP.search(prompt):
        before, after = (side.strip() for side in gap.groups())
        return f"between {before!r} and {after!r}", False
    turns = _TURN.findall(prompt)
    orders = [found for role, text in turns if role == "user" and (found := list(_ORDER.finditer(text)))]
    if not orders:
        return NO_ORDER, False
    verb, words, slowly, fill = orders[-1][-1].groups()
    match verb or fill:
        case "say":
            return (f"{words} " * 1200, True) if slowly else (words, False)
        case "recall":
            has_said = any(role == "assistant" and words in text for role, text in turns)
            return f"I have{' ' if has_said else ' not '}said: {words}", False
        case "fill" if guide is not None:
            return json.dumps(instance_of(json.loads(guide.value))), False
        case "fill":
            return _call(form_call(_tools(turns))) if turns[-1][0] != "tool" else "The form is filled in.", False
    results = [text for role, text in turns if role == "tool"]
    if results:
        return f"it printed: {results[-1]}", False
    return _call(call) if (call := command_call(_tools(turns), words)) else NO_TOOL, False


def _tools(turns: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the functions that stand at the head of the prompt."""
    head = turns[0][1]
    return [tool["function"] for tool in json.loads(head.split("\n<tool_call>")[0])] if head.startswith("[{") else []


def _call(call: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def instance_of(schema: dict[str, Any]) -> Any:
    """Return the simplest instance of a schema that has types and properties only."""
    if schema["type"] == "object":
        return {name: instance_of(value) for name, value in schema["properties"].items()}
    return _EXAMPLES[schema["type"]]


def form_call(tools: list[dict[str, Any]]) -> dict[str, Any]:
    [form] = [tool for tool in tools if tool["name"] == FORM_TOOL]
    return {"name": FORM_TOOL, "arguments": instance_of(form["parameters"])}


def command_call(tools: list[dict[str, Any]], command: str) -> dict[str, Any] | None:
    """Return a call of the first tool that takes a command, None if none does."""
    for tool in tools:
        properties = tool["parameters"].get("properties", {})
        for name in ("command", "cmd", "commands"):
            if name in properties:
                value = [command] if name == "commands" else command
                needed = set(tool["parameters"].get("required", ())) - {name}
                return {"name": tool["name"], "arguments": {name: value, **dict.fromkeys(sorted(needed), "x")}}
    return None


@contextmanager
def obedient_frontend(port: int = 0) -> Iterator[tuple[str, ObedientModel]]:
    """Yield the URL of a running frontend with the model `tiny`, and the model."""
    model = ObedientModel()
    up, stop = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def run() -> None:
        with TemporaryDirectory() as folder:
            registry = ModelRegistry()
            card = able_card(tiny.save_model(Path(folder), TEMPLATE, READS), context_tokens=CONTEXT_TOKENS)
            registry.add(card)
            await registry.get(card.model)
            api = FrontendApi(HttpSettings(), registry, model)
            async with listening(api.app, "127.0.0.1", port) as url:
                found.extend([url, asyncio.get_running_loop()])
                up.set()
                await stop.wait()

    def run_and_report() -> None:
        try:
            asyncio.run(run())
        finally:
            up.set()

    thread = threading.Thread(target=run_and_report, name="frontend of an obedient model")
    thread.start()
    try:
        assert up.wait(60) and found, "the frontend has not come up"
        yield found[0], model
    finally:
        if found:
            found[1].call_soon_threadsafe(stop.set)
        thread.join(60)


if __name__ == "__main__":
    with obedient_frontend(int(sys.argv[1]) if sys.argv[1:] else 0) as (own_url, _):
        print(own_url, flush=True)
        threading.Event().wait()
