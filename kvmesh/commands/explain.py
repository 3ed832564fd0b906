"""Run `kvmesh explain "prompt"`: ask a running mesh where a prompt would run, and why. Nothing is generated."""

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Annotated

import aiohttp
import msgspec
from msgspec import Meta, Struct
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmesh.commands.http_client import ClientConfig, open_session, refusal_of
from kvmesh.frontend.control_tokens import control_tokens
from kvmesh.frontend.formats import AnswerFormat
from kvmesh.frontend.models import Model
from kvmesh.frontend.openai.parameters import parse_either
from kvmesh.frontend.prompts import read_prompts
from kvmesh.frontend.templates import ChatTemplate
from kvmesh.frontend.tokenizer import Tokenizer
from kvmesh.mesh.config import load
from kvmesh.mesh.identity.credentials import MeshTls
from kvmesh.protocol.errors import ConfigError, UnreachableError
from kvmesh.protocol.messages import CandidateReport, Explanation, Target, WorkerCard, unpack_tokens

TIMEOUT_S = 30.0
WIDE = 100  # columns of a terminal where a note has a column of its own
LEGS = {"whole": "prompt and answer", "prefill": "the prompt", "decode": "the answer"}
TIERS = ("device", "host", "disk", "elsewhere")


class ExplainConfig(ClientConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_EXPLAIN_<NAME>`, that over the TOML file of `--config`, that over the default."""

    router: Annotated[
        str, Meta(description="HTTP API of a router instead of a frontend; the model's folder has to be readable here")
    ] = ""
    model: Annotated[str, Meta(description="model; default: the only one that is served")] = ""
    raw: Annotated[bool, Meta(description="the prompt is a text completion, without the chat template")] = False
    json: Annotated[bool, Meta(description="print one JSON object")] = False
    mesh_tls: MeshTls = ""


class PlacementReply(Struct, frozen=True):
    """Hold the part of a frontend's or router's answer that is shown here: see kvmesh.router.api.PlaceReply."""

    model: str
    block_size: int
    isl_tokens: int
    decode: Target
    prefill: Target | None
    explanation: Explanation | None


class _Workers(Struct, frozen=True):
    """Hold the answer of a router to GET /workers."""

    workers: list[WorkerCard]


def main(argv: list[str]) -> int:
    has_prompt = bool(argv) and (argv[-1] == "-" or not argv[-1].startswith("-"))
    config = load(
        ExplainConfig,
        argv[:-1] if has_prompt else argv,
        os.environ,
        prefix="KVMESH_EXPLAIN_",
        prog="kvmesh explain",
        description="Ask a running mesh where a prompt would run, and why; nothing is generated. The prompt is the "
        'last argument: kvmesh explain [options] "Tell me a story."; - reads it from the standard input.',
        section="explain",
    )
    if not has_prompt:
        raise ConfigError("there is no prompt", hint='write it last: kvmesh explain "Tell me a story."')
    body = asyncio.run(ask(config, sys.stdin.read() if argv[-1] == "-" else argv[-1]))
    if config.json:
        print(body.decode())
    else:
        show(msgspec.json.decode(body, type=PlacementReply), Console(highlight=False))
    return 0


# --- asking -------------------------------------------------------------------------------------------


async def ask(config: ExplainConfig, prompt: str) -> bytes:
    """Return the mesh's answer, JSON of a PlacementReply. Raises MeshError."""
    chat = [{"role": "user", "content": prompt}]
    content: dict[str, object] = {"prompt": prompt} if config.raw else {"messages": chat}
    asked = config.router or config.url
    try:
        async with open_session(config.api_key, config.ca_file, TIMEOUT_S, mesh_tls=config.mesh_tls) as http:
            if config.router:
                return await ask_router(http, asked, config.model, content)
            return await ask_frontend(http, asked, config.model, content, is_member=bool(config.mesh_tls))
    except aiohttp.ClientConnectorCertificateError as error:
        found = f"the certificate of {asked} is not trusted: {error.certificate_error}"
        raise UnreachableError(found, hint="name the file that it can be checked with: --ca-file") from error
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        reason = str(error) or f"it took more than {TIMEOUT_S:g} s"
        hint = "start a mesh with `kvmesh up`, or set --url"
        raise UnreachableError(f"no mesh answers at {asked}: {reason}", hint=hint) from error


async def ask_frontend(
    http: aiohttp.ClientSession, url: str, model: str, content: dict[str, object], *, is_member: bool = False
) -> bytes:
    if not model and is_member:  # the port for members has no list of models
        model = only(msgspec.json.decode(await fetch(http, "GET", f"{url}/health"))["ready_models"])
    elif not model:
        served = msgspec.json.decode(await fetch(http, "GET", f"{url}/v1/models"))
        model = only([entry["id"] for entry in served["data"]])
    return await fetch(http, "POST", f"{url}/kvmesh/route", {"model": model} | content)


async def ask_router(http: aiohttp.ClientSession, url: str, model: str, content: dict[str, object]) -> bytes:
    """Ask a router. It takes tokens only, so the prompt is tokenized here."""
    cards = msgspec.json.decode(await fetch(http, "GET", f"{url}/workers"), type=_Workers).workers
    model = model or only(sorted({card.model for card in cards}))
    card = next((card for card in cards if card.model == model), None)
    if card is None:
        raise ConfigError(f"no worker of the model {model!r} is known at {url}", hint="see --model")
    call = parse_either(msgspec.json.encode({"model": model} | content))
    [prompt, *_] = await read_prompts(call, await asyncio.to_thread(load_model, card))
    fields = {"model": model, "prompt_tokens": unpack_tokens(prompt.tokens), "book": False, "explain": True}
    return await fetch(http, "POST", f"{url}/place", fields)


def load_model(card: WorkerCard) -> Model:
    """Load tokenizer and template of a worker's model. Raises ConfigError if its folder cannot be read."""
    # One prompt does not pay for the proof that the faster library is equal
    tokenizer = Tokenizer.load(card.model_path, backend="hf", cache_bytes=0)
    template = ChatTemplate.load(card.model_path)
    return Model(
        name=card.model,
        tokenizer=tokenizer,
        template=template,
        format=AnswerFormat(),
        context_tokens=card.context_tokens,
        block_size=card.block_size,
        created=0,
        base=card.model,
        control=control_tokens(tokenizer, template.source if template else ""),
    )


async def fetch(http: aiohttp.ClientSession, method: str, url: str, body: object = None) -> bytes:
    async with http.request(method, url, json=body) as response:
        content = await response.read()
    if response.status != 200:
        raise refusal_of(url, response.status, content)
    return content


def only(names: Sequence[str]) -> str:
    if len(names) != 1:
        raise ConfigError(f"models served here: {', '.join(names) or 'none'}", hint="choose one with --model")
    return names[0]


# --- for people ---------------------------------------------------------------------------------------


def show(reply: PlacementReply, console: Console) -> None:
    console.print(f"{reply.isl_tokens} prompt tokens for {reply.model}, in blocks of {reply.block_size}")
    console.print(Text(where(reply), "bold"))
    if (explanation := reply.explanation) is None:
        return
    for leg, candidates in groupby(explanation.candidates, key=lambda c: c.leg):
        console.print(table_of(leg, list(candidates), console.width))
    for line in unbooked(explanation.candidates):
        console.print(Text(line))
    console.print(Text(f"\nwhy     {explanation.why}"))
    if explanation.would_wait:
        console.print("wait    it would wait in the router: every worker that could take it is saturated")
    if explanation.total_s:
        console.print(f"time    {explanation.first_s:.2f} s to the first token, {explanation.total_s:.2f} s in all")
    console.print(f"policy  {explanation.policy}")
    console.print(f"price   {explanation.recompute_price:g}: what a block to compute counts against one in a queue")
    console.print(f"busy    {explanation.busy_share:.0%} of the workers' time has gone into prompts lately")
    console.print(
        f"demand  {explanation.asked_before:g} recent requests whose cached prefix ended where this one's does"
    )


def unbooked(candidates: Sequence[CandidateReport]) -> Iterator[str]:
    """Yield a line for each worker with load that no router has booked."""
    for c in {(c.worker, c.dp_rank): c for c in candidates}.values():
        found = [
            f"{count} {what}"
            for count, what in (
                (c.unbooked_requests, "requests of other callers"),
                (c.unbooked_blocks, "of their blocks"),
                (c.unbooked_tokens, "prompt tokens more than booked"),
            )
            if count
        ]
        if found:
            yield f"{c.worker}/{c.dp_rank} reports {', '.join(found)}"


def where(reply: PlacementReply) -> str:
    decode, prefill = reply.decode, reply.prefill
    known = f"{(prefill or decode).overlap_blocks * reply.block_size} tokens are cached there"
    if prefill is None:
        return f"{decode.name} would compute prompt and answer; {known}"
    return f"{prefill.name} would compute the prompt ({known}), {decode.name} the answer"


def table_of(leg: str, candidates: Sequence[CandidateReport], width: int) -> Table:
    """Return the candidates. In a narrow terminal figures stay whole, and a note shares a column with the terms."""
    title = f"\nWho could compute {LEGS.get(leg, leg)}; costs are in blocks"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("worker", overflow="fold", min_width=min(16, max(len(c.worker) for c in candidates)))
    table.add_column("cost", justify="right", no_wrap=True, min_width=max(len(f"{c.cost:g}") for c in candidates))
    is_wide = width >= WIDE
    for name in ("cached blocks", "queued tokens", "held blocks", "requests"):
        table.add_column(name if is_wide else name.replace(" ", "\n"), justify="right", no_wrap=True)
    table.add_column("cost is made of", overflow="fold")
    if is_wide:
        table.add_column("")
    for c in candidates:
        worker = f"{c.worker}/{c.dp_rank}" if c.dp_rank else c.worker
        counts = [f"{value:g}" for value in (c.queued_tokens, c.held_blocks, c.requests)]
        last = [terms(c), c.note] if is_wide else ["; ".join(filter(None, [c.note, terms(c)]))]
        row = [worker, f"{c.cost:g}", cached(c.overlap_blocks), *counts, *last]
        table.add_row(*map(Text, row), style="bold green" if c.note == "chosen" else "")
    return table


def cached(overlap_blocks: Sequence[int]) -> str:
    """Return the cached blocks by tier. Each entry of `overlap_blocks` includes the tiers above it."""
    device, *_ = overlap_blocks
    below = [deeper - above for above, deeper in pairwise(overlap_blocks)]
    return " ".join([str(device), *(f"+{n} {tier}" for n, tier in zip(below, TIERS[1:], strict=True) if n)])


def terms(c: CandidateReport) -> str:
    total = " + ".join(f"{name} {value:g}" for name, value in c.terms.items()) or "nothing"
    return total if c.capacity == 1 else f"({total}) / {c.capacity:g}"
