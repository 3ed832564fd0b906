"""Check the endpoints before a run: what is missing is said before anything is measured."""

import time
from collections.abc import Mapping, Sequence
from typing import Literal

import aiohttp
import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from kvmesh.commands.bench.client import EndpointClient
from kvmesh.commands.bench.config import ServeBenchConfig
from kvmesh.commands.bench.reading import StreamReading
from kvmesh.commands.bench.results import EndpointFacts
from kvmesh.commands.bench.texts import TextMaker, plain_words, words_of_one_token
from kvmesh.commands.bench.workload import merged_body
from kvmesh.commands.http_client import beginning_of
from kvmesh.protocol.errors import ConfigError

SHORT_WORDS, LONG_WORDS = 64, 320
PROBE_TOKENS = 8
PROBE_TIMEOUT_S = 60.0
MOST_TOKENS_PER_WORD = 6.0
ALIKE = 0.02  # relative difference of two counts of the same prompt
COUNTS_ALIKE = "prompts counted"
OK = "ok"
# Without these nothing can be measured; what else is missing makes figures less certain.
NEEDED = ("reachable", "model listed", "answers", "streams")


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


def named_endpoints(texts: Sequence[str]) -> dict[str, str]:
    """Return the URLs of endpoints by name. Raise ConfigError."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, url = text.partition("=")
        if not equals or "://" in name:
            name, url = f"endpoint-{len(found) + 1}" if len(texts) > 1 else "endpoint", text
        if not name or name in found or not url.startswith(("http://", "https://")):
            raise ConfigError(f"{text!r} names no endpoint", hint="give name=http://host:port, each name once")
        found[name] = url.rstrip("/").removesuffix("/v1")
    return found


async def check_endpoints(config: ServeBenchConfig, tokenizer: Tokenizer | None) -> list[EndpointFacts]:
    """Return what was learned about each endpoint, in the order of the settings."""
    words = words_of_one_token(tokenizer) if tokenizer else plain_words()
    maker = TextMaker(words, 1.0, 0.0, config.seed)
    texts = (maker.text("check short", SHORT_WORDS), maker.text("check long", LONG_WORDS))
    found = [
        await _check_one(name, url, config, texts, tokenizer) for name, url in named_endpoints(config.endpoints).items()
    ]
    return compared(found)


def compared(found: Sequence[EndpointFacts]) -> list[EndpointFacts]:
    """Add whether all endpoints count prompts as the first one does: else their figures per token are not alike."""
    if len(found) < 2:
        return list(found)
    first = found[0].words_per_token

    def verdict(facts: EndpointFacts) -> str:
        if abs(facts.words_per_token - first) <= ALIKE * first:
            return OK
        return f"{1 / facts.words_per_token:.2f} tokens a word, {1 / first:.2f} at {found[0].name}: other tokenizers"

    return [
        msgspec.structs.replace(facts, checks={**facts.checks, COUNTS_ALIKE: verdict(facts)})
        if facts.checks.get("usage") == OK and found[0].checks.get("usage") == OK
        else facts
        for facts in found
    ]


def missing(found: Sequence[EndpointFacts]) -> list[str]:
    """Return what keeps endpoints from being measured."""
    return [
        f"{facts.name}: {name}: {said}"
        for facts in found
        for name, said in facts.checks.items()
        if name in NEEDED and said != OK
    ]


async def _check_one(
    name: str, url: str, config: ServeBenchConfig, texts: tuple[str, str], tokenizer: Tokenizer | None
) -> EndpointFacts:
    checks: dict[str, str] = {}
    model, server = config.model, ""
    try:
        models, server = await _models(url, config.api_key)
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
        checks["reachable"] = f"{url}/v1/models: {str(error) or type(error).__name__}"
        return EndpointFacts(name=name, url=url, model=model, checks=checks)
    checks["reachable"] = OK
    if not model and len(models) == 1:
        model = models[0]
    listed = ", ".join(models[:5]) or "none"
    checks["model listed"] = OK if model in models else f"it lists {listed}; name one with --model"
    if model not in models:
        return EndpointFacts(name=name, url=url, model=model, server=server, checks=checks)
    short = await probe(url, model, config, texts[0])
    long = await probe(url, model, config, texts[1])
    if failed := short.failure or long.failure:
        checks["answers"] = f"{failed}: {short.detail or long.detail}"
        return EndpointFacts(name=name, url=url, model=model, server=server, checks=checks)
    return measured_facts(
        EndpointFacts(name=name, url=url, model=model, server=server, checks=checks), short, long, tokenizer, texts
    )


def measured_facts(
    facts: EndpointFacts,
    short: StreamReading,
    long: StreamReading,
    tokenizer: Tokenizer | None,
    texts: tuple[str, str],
) -> EndpointFacts:
    """Return the facts with what two whole answers to `texts` show. Pure."""
    checks = {**facts.checks, "answers": OK}
    checks["streams"] = OK if long.events > 1 else "the whole answer came in one event: no TTFT or ITL can be seen"
    has_usage = short.completion_tokens is not None and long.completion_tokens is not None
    checks["usage"] = OK if has_usage else "stream_options.include_usage is ignored: tokens are counted by events"
    counted = long.completion_tokens if long.completion_tokens is not None else long.events
    wrong = f"{counted} tokens instead of {PROBE_TOKENS}: max_tokens or ignore_eos is not obeyed"
    checks["answer length"] = OK if counted == PROBE_TOKENS else wrong
    per_word, template = 1.0, 0.0
    if has_usage:
        per_word = (long.prompt_tokens - short.prompt_tokens) / (LONG_WORDS - SHORT_WORDS)
        if not 0.5 <= per_word <= MOST_TOKENS_PER_WORD:
            checks["prompt count"] = f"{per_word:.2f} tokens for a word cannot be: usage counts something else"
            per_word = 1.0
        else:
            template = max(0.0, short.prompt_tokens - per_word * SHORT_WORDS)
            checks["prompt count"] = _against_tokenizer(long.prompt_tokens - short.prompt_tokens, tokenizer, texts)
    return msgspec.structs.replace(
        facts, words_per_token=1 / per_word, template_tokens=round(template, 1), checks=checks
    )


def _against_tokenizer(counted: int, tokenizer: Tokenizer | None, texts: tuple[str, str]) -> str:
    if tokenizer is None:
        return OK
    sizes = [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    expected = sizes[1] - sizes[0]
    if abs(counted - expected) <= ALIKE * expected:
        return OK
    return f"{counted} tokens where --tokenizer has {expected}: another tokenizer"


async def probe(url: str, model: str, config: ServeBenchConfig, text: str, tokens: int = PROBE_TOKENS) -> StreamReading:
    """Ask once, and return what came."""
    path, asked = asked_of(config.api, text)
    common = merged_body(config.api, model, config.extra, ignore_eos=config.ignore_eos)
    client = EndpointClient(url, path, config.api_key)
    reading = StreamReading()
    try:
        await client.ask(msgspec.json.encode({**common, **asked, "max_tokens": tokens}), reading, PROBE_TIMEOUT_S)
    finally:
        client.close()
    return reading


def asked_of(api: Literal["chat", "completions"], text: str) -> tuple[str, Mapping[str, object]]:
    if api == "completions":
        return "/v1/completions", {"prompt": text}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}


async def _models(url: str, api_key: str) -> tuple[list[str], str]:
    """Return the models that an endpoint lists, and what it says of its software."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        async with session.get(f"{url}/v1/models") as reply:
            body = await reply.read()
            if reply.status != 200:
                raise OSError(f"status {reply.status}: {beginning_of(body)}")
            server = reply.headers.get("server", "")
            owners = msgspec.json.decode(body, type=_Models)
        try:
            async with session.get(f"{url}/version") as reply:
                if reply.status == 200 and len(said := await reply.read()) < 200:
                    server = f"{server} {said.decode(errors='replace')}".strip()
        except aiohttp.ClientError:
            pass  # most have no such page
    return [model.id for model in owners.data], server


async def warm_up(facts: EndpointFacts, config: ServeBenchConfig, count: int) -> None:
    """Ask requests of a run's size one after the other; their answers do not count."""
    began = time.time_ns()
    maker = TextMaker(plain_words(), 1 / facts.words_per_token, facts.template_tokens, config.seed)
    for number in range(count):
        text = maker.text(f"warm-up {began} {number}", maker.first_tokens(min(config.isl, config.max_isl)))
        await probe(facts.url, facts.model, config, text, min(config.osl, 64))
