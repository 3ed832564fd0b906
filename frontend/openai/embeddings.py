"""POST /v1/embeddings: texts to vectors, where a worker computes them."""

import asyncio
import base64
import math
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta, Struct

from frontend import metrics
from frontend.bodies import decode_body
from frontend.endpoint import (
    Endpoint,
    Services,
    as_failure,
    new_id,
    request_id_headers,
    timeout_s,
    with_hints,
)
from frontend.errors import outcome
from frontend.generator import Generator, Hints
from frontend.keys.caller import caller_of
from frontend.keys.meter import Visit
from frontend.keys.visits import begin, model_for
from frontend.models import Model
from frontend.openai.parameters import prompts_of
from frontend.operation import ASKED_FAILURES, Operation, ShapeNotes
from frontend.prompts import given_tokens, in_turns, refuse_empty, text_tokens
from frontend.request import ParsedBody
from frontend.running import first_failure
from frontend.shapes import MAX_USER_CHARS, ModelName, Salt, Strict, TokenId
from mesh.http.connection import refusal
from mesh.http.request import Reply, Request, json_reply
from mesh.http.server import client_request_id
from protocol.errors import ContextLengthError, EngineError, InvalidRequestError
from protocol.ids import RequestId
from protocol.messages import Embedding, EmbedRequest, Feature

NAME = "embeddings"  # of the endpoint in metrics
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
    try:
        deadline = started + timeout_s(request, services.limits)
        with services.admission.enter(), services.admission.until(deadline):
            parsed = with_hints(request, parse_embeddings(request.body), is_steered=services.is_steered)
            model = await model_for(request, services.models, parsed.model)
            base = model.base
            visit = await begin(request)
            reply = await embed(parsed, model, services.generator, request_id, deadline, visit)
            used_tokens = reply.usage.total_tokens
        result = "ok"
        return json_reply(reply, headers=headers)
    except Exception as error:
        failure = as_failure(error, request_id)
        result = outcome(failure)
        return refusal(failure, None, headers)
    finally:
        counters = metrics.of_endpoint(NAME, base)
        counters.requests(result).inc()
        if visit is not None:
            visit.end(used_tokens)
        if (caller := caller_of(request)) is not None:
            caller.usage.count(result)
            caller.usage.add(used_tokens, 0)
        duration_s = asyncio.get_running_loop().time() - started
        counters.duration.observe(duration_s)
        if services.gen_ai is not None:
            services.gen_ai.ended(NAME, base, result, duration_s)


async def embed(
    parsed: ParsedEmbeddings,
    model: Model,
    generator: Generator,
    request_id: RequestId,
    deadline: float,
    visit: Visit | None = None,
) -> EmbeddingsReply:
    """Have all vectors computed. Raise MeshError."""
    if Feature.EMBEDDINGS not in model.features:
        raise InvalidRequestError(f"the workers of {model.name!r} compute no embeddings", param="model")
    inputs = await read_inputs(parsed, model)
    num_tokens = sum(len(tokens) for tokens in inputs) // 4
    if visit is not None:
        await visit.reserve(num_tokens, 0)
    requests = [
        EmbedRequest(
            request_id=RequestId(f"{request_id}-{index}"),
            model=model.base,
            prompt=tokens,
            lora=model.lora,
            cache_salt=parsed.cache_salt,
        )
        for index, tokens in enumerate(inputs)
    ]
    vectors = [embedding.vector for embedding in await ask(requests, parsed.hints, generator, deadline)]
    check_vectors(vectors)
    check_dimensions(parsed.dimensions, vectors)
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


async def ask(requests: Sequence[EmbedRequest], hints: Hints, generator: Generator, deadline: float) -> list[Embedding]:
    """Return the workers' answers, in the order of `requests`; few are under way at once. Raise MeshError."""
    at_once = asyncio.Semaphore(INPUTS_AT_ONCE)

    async def one(request: EmbedRequest) -> Embedding:
        async with at_once:
            return await generator.embed(request, hints, deadline)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
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
