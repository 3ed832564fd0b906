"""POST /v1/embeddings: texts to vectors, where a worker computes them."""

import asyncio
import base64
import math
from array import array
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta, Struct

from kvmesh.frontend import metrics
from kvmesh.frontend.access_log import access_fields
from kvmesh.frontend.bodies import decode_body
from kvmesh.frontend.callers import Visit, begin, caller_of, model_for
from kvmesh.frontend.endpoint import (
    Endpoint,
    Services,
    as_failure,
    carried,
    new_id,
    request_id_headers,
    timeout_s,
    with_hints,
)
from kvmesh.frontend.errors import outcome
from kvmesh.frontend.generator import Generator, Hints
from kvmesh.frontend.models import Model
from kvmesh.frontend.openai.parameters import prompts_of
from kvmesh.frontend.operation import ASKED_FAILURES, Operation, ShapeNotes
from kvmesh.frontend.prompts import given_tokens, in_turns, refuse_empty, text_tokens
from kvmesh.frontend.request import ParsedBody
from kvmesh.frontend.running import first_failure
from kvmesh.frontend.shapes import MAX_USER_CHARS, ModelName, Salt, Strict, TokenId
from kvmesh.frontend.timeline import EMBEDDINGS as NAME
from kvmesh.frontend.timeline import MAX_VECTORS, AnswerRecord, RequestTimeline
from kvmesh.frontend.timeline import now as clock
from kvmesh.mesh.http.connection import refusal
from kvmesh.mesh.http.request import Reply, Request, json_reply
from kvmesh.mesh.http.server import client_request_id
from kvmesh.protocol.errors import ContextLengthError, EngineError, InvalidRequestError
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import Embedding, EmbedRequest, Feature

MAX_INPUTS = 2048
INPUTS_AT_ONCE = 64  # of one request, at workers
SHOWN_AT_ONCE_BYTES = 256 << 10  # of vectors turned into JSON's numbers in one turn of the event loop


class EmbeddingsRequest(Strict, frozen=True):
    model: ModelName
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    user: Annotated[str, Meta(max_length=MAX_USER_CHARS)] | None = None  # names the session
    cache_salt: Salt | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None  # supported for the model's own number only


class EmbeddingObject(Struct, frozen=True, kw_only=True):
    index: int
    embedding: list[float] | str  # base64 of float32, little endian
    object: str = "embedding"


class EmbeddingsUsage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(Struct, frozen=True, kw_only=True):
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingsUsage
    object: str = "list"


_decoder = msgspec.json.Decoder(EmbeddingsRequest)


class ParsedEmbeddings(ParsedBody, frozen=True, kw_only=True):
    """A request for vectors."""

    inputs: Sequence[str | Sequence[int]]  # texts or token ids
    as_base64: bool
    dimensions: int | None


def parse_embeddings(body: bytes) -> ParsedEmbeddings:
    """Return what the body asks for. Raise InvalidRequestError."""
    request = decode_body(body, _decoder)
    return ParsedEmbeddings(
        model=request.model,
        inputs=prompts_of(request.input, "input", MAX_INPUTS),
        cache_salt=request.cache_salt,
        hints=Hints(session=request.user or "", disaggregate=False),
        as_base64=request.encoding_format == "base64",
        dimensions=request.dimensions,
    )


async def answer(services: Services, request: Request) -> Reply:
    """Answer one request for vectors, and count how it ended. Failures are answers too."""
    started = asyncio.get_running_loop().time()
    theirs = client_request_id(request)
    request_id = new_id("embd", theirs)
    headers = request_id_headers(theirs or request_id)
    result, used_tokens, visit, base = "client_gone", 0, None, ""
    timeline = services.timelines.begin(request_id, NAME, request.headers)
    try:
        deadline = started + timeout_s(request, services.limits)
        with services.admission.enter(), services.admission.until(deadline):
            parsed = with_hints(request, parse_embeddings(request.body), is_steered=services.is_steered)
            if timeline is not None:
                timeline.parsed, timeline.model = clock(), parsed.model
            model = await model_for(request, services.models, parsed.model)
            base = model.base
            visit = await begin(request)
            inputs = await read_embedded(parsed, model, visit)
            requests = requests_of(inputs, parsed, model, request_id, carried(request))
            records = recorded(timeline, inputs)
            reply = await embed(requests, parsed, model, services.generator, deadline, records)
            used_tokens = reply.usage.total_tokens
        result = "ok"
        return json_reply(reply, headers=headers)
    except Exception as error:
        failure = as_failure(error, request_id, "" if timeline is None else timeline.trace_id)
        result = outcome(failure)
        return refusal(failure, None, headers)
    finally:
        if visit is not None:
            visit.end(used_tokens)
        if (caller := caller_of(request)) is not None:
            caller.usage.count(result)
            caller.usage.add(used_tokens, 0)
        count(services, request, base, result, asyncio.get_running_loop().time() - started, timeline)


def count(
    services: Services, request: Request, model: str, result: str, duration_s: float, timeline: RequestTimeline | None
) -> None:
    """Tell the metrics and those who look how a request ended."""
    counters = metrics.of_endpoint(NAME, model)
    counters.requests(result).inc()
    counters.duration.observe(duration_s)
    if services.gen_ai is not None:
        services.gen_ai.ended(NAME, model, result, duration_s)
    if timeline is None:
        return
    if services.slo.missed(result, None, 0.0) == "failed":
        timeline.slo_missed = "failed"
    timeline.has_migrated = any(attempt.error for answer in timeline.answers for attempt in answer.attempts)
    if services.timelines.end(timeline, result):
        counters.exemplify(timeline.trace_id, duration_s)
        if services.gen_ai is not None:
            services.gen_ai.exemplify(NAME, model, result, timeline.trace_id, duration_s)
    if services.timelines.is_logged:
        request.log_fields = partial(access_fields, timeline)


async def read_embedded(parsed: ParsedEmbeddings, model: Model, visit: Visit | None) -> list[bytes]:
    """Return the tokens of each input, and take them from the limits of the caller. Raise MeshError."""
    if Feature.EMBEDDINGS not in model.features:
        raise InvalidRequestError(f"the workers of {model.name!r} compute no embeddings", param="model")
    inputs = await read_inputs(parsed, model)
    if visit is not None:
        await visit.reserve(tokens_in(inputs), 0)
    return inputs


def tokens_in(inputs: Sequence[bytes]) -> int:
    return sum(len(tokens) for tokens in inputs) // 4


def recorded(timeline: RequestTimeline | None, inputs: Sequence[bytes]) -> Sequence[AnswerRecord]:
    """Return the records of the first inputs, which were tokenized just now; none while nobody looks."""
    if timeline is None:
        return ()
    timeline.tokenized, timeline.isl_tokens = clock(), tokens_in(inputs)
    timeline.answers = [timeline.answer(index) for index in range(min(len(inputs), MAX_VECTORS))]
    return timeline.answers


def requests_of(
    inputs: Sequence[bytes], parsed: ParsedEmbeddings, model: Model, request_id: RequestId, trace: tuple[str, str]
) -> list[EmbedRequest]:
    """Return what workers are asked; `trace`: as the client has sent it."""
    return [
        EmbedRequest(
            request_id=RequestId(f"{request_id}-{index}"),
            model=model.base,
            prompt=tokens,
            lora=model.lora,
            cache_salt=parsed.cache_salt,
            traceparent=trace[0],
            tracestate=trace[1],
        )
        for index, tokens in enumerate(inputs)
    ]


async def embed(
    requests: Sequence[EmbedRequest],
    parsed: ParsedEmbeddings,
    model: Model,
    generator: Generator,
    deadline: float,
    records: Sequence[AnswerRecord] = (),
) -> EmbeddingsReply:
    """Have all vectors computed. Raise MeshError."""
    answers = await ask(requests, parsed.hints, generator, deadline, records)
    vectors = [embedding.vector for embedding in answers]
    check_vectors(vectors)
    check_dimensions(parsed.dimensions, vectors)
    num_tokens = tokens_in([request.prompt for request in requests])
    return EmbeddingsReply(
        data=await embedding_objects(vectors, parsed.as_base64),
        model=model.name,
        usage=EmbeddingsUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
    )


async def read_inputs(parsed: ParsedEmbeddings, model: Model) -> list[bytes]:
    """Return the tokens of each input, u32 little endian. Raise InvalidRequestError, ContextLengthError."""

    async def read(given: str | Sequence[int]) -> bytes:
        if isinstance(given, str):
            return await text_tokens(given, model, "input", parsed.cache_salt)
        return given_tokens(given, model, "input")

    inputs = await in_turns(parsed.inputs, read)
    if not all(inputs):
        refuse_empty("input")
    for tokens in inputs:
        check_fits(len(tokens) // 4, model)
    return inputs


async def ask(
    requests: Sequence[EmbedRequest],
    hints: Hints,
    generator: Generator,
    deadline: float,
    records: Sequence[AnswerRecord] = (),
) -> list[Embedding]:
    """Return the workers' answers, in the order of `requests`; few are under way at once. Raise MeshError."""
    at_once = asyncio.Semaphore(INPUTS_AT_ONCE)

    async def one(request: EmbedRequest, record: AnswerRecord | None) -> Embedding:
        async with at_once:
            return await generator.embed(request, hints, deadline, record)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(request, record))
                for request, record in zip_longest(requests, records[: len(requests)])
            ]
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from failures
    return [task.result() for task in tasks]


def check_fits(num_tokens: int, model: Model) -> None:
    """Raises ContextLengthError."""
    if num_tokens > model.context_tokens:
        raise ContextLengthError(
            f"This model's maximum context length is {model.context_tokens} tokens. However, an input has "
            f"{num_tokens} tokens",
            hint="shorten it",
            param="input",
        )


def check_vectors(vectors: Sequence[bytes]) -> None:
    """Raises EngineError if they are not float32 numbers, as many in each."""
    sizes_bytes = {len(vector) for vector in vectors}
    if len(sizes_bytes) != 1 or (size_bytes := sizes_bytes.pop()) == 0 or size_bytes % 4:
        raise EngineError("the workers have sent vectors that are none", hint="run one version everywhere")


def check_dimensions(asked: int | None, vectors: Sequence[bytes]) -> None:
    """Raises InvalidRequestError: a vector is not cut, since few models were trained for that."""
    if asked is not None and asked != len(vectors[0]) // 4:
        raise InvalidRequestError(
            f"The parameter 'dimensions' is {asked}, and this model's vectors have {len(vectors[0]) // 4}",
            hint="leave it out",
            param="dimensions",
        )


async def embedding_objects(vectors: Sequence[bytes], as_base64: bool) -> list[EmbeddingObject]:
    """Their numbers as JSON already: millions of them, written in one go, would hold up the event loop."""
    objects: list[EmbeddingObject] = []
    at_once = max(1, SHOWN_AT_ONCE_BYTES // len(vectors[0]))
    for index, vector in enumerate(vectors):
        numbers = msgspec.Raw(msgspec.json.encode(shown(vector, as_base64)))
        objects.append(EmbeddingObject(index=index, embedding=cast(str, numbers)))
        if index % at_once == at_once - 1:
            await asyncio.sleep(0)
    return objects


def shown(vector: bytes, as_base64: bool) -> list[float] | str:
    """Raises EngineError for numbers that JSON does not know."""
    if as_base64:
        return base64.b64encode(vector).decode()
    numbers = array("f")
    numbers.frombytes(vector)
    if not all(map(math.isfinite, numbers)):
        raise EngineError("the engine has computed numbers that are none", hint="look at the worker's log")
    return numbers.tolist()


ENDPOINT = Endpoint(
    method="POST",
    path="/v1/embeddings",
    handler=answer,
    operation=Operation(
        summary="Turn texts into vectors",
        request=(EmbeddingsRequest,),
        reply=EmbeddingsReply,
        failures=ASKED_FAILURES,
        is_asked=True,
        takes_hints=True,
        notes=ShapeNotes(examples={(EmbeddingsRequest, "input"): "Once upon a time"}),
    ),
)
