"""POST /v1/embeddings: texts to vectors, where a worker computes them."""

import asyncio
import base64
import math
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta, Struct

from frontend.call import Call, Endpoint
from frontend.generator import Generator, Hints
from frontend.models import Model
from frontend.openai import MAX_USER_CHARS, ModelName, Salt, Strict, TokenId
from frontend.parameters import decode_body, prompts_of
from frontend.pipeline import Prompt, first_failure, read_prompts
from protocol.errors import ContextLengthError, EngineError, InvalidRequestError
from protocol.ids import RequestId
from protocol.messages import Embedding, EmbedRequest, Feature

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


class EmbeddingsCall(Struct, frozen=True):
    call: Call
    as_base64: bool
    dimensions: int | None


def parse_embeddings(body: bytes) -> EmbeddingsCall:
    """Raises InvalidRequestError."""
    request = decode_body(body, _decoder)
    call = Call(
        endpoint=Endpoint.EMBEDDINGS,
        model=request.model,
        prompts=prompts_of(request.input, "input", MAX_INPUTS),
        cache_salt=request.cache_salt,
        hints=Hints(session=request.user or "", disaggregate=False),
    )
    return EmbeddingsCall(call, request.encoding_format == "base64", request.dimensions)


async def embed(
    asked: EmbeddingsCall, model: Model, generator: Generator, request_id: RequestId, deadline: float
) -> EmbeddingsReply:
    """Raises MeshError."""
    if Feature.EMBEDDINGS not in model.features:
        raise InvalidRequestError(f"the workers of {model.name!r} compute no embeddings", param="model")
    prompts = await read_prompts(asked.call, model)
    for prompt in prompts:
        check_fits(prompt, model)
    at_once = asyncio.Semaphore(INPUTS_AT_ONCE)

    async def one(index: int, prompt: Prompt) -> Embedding:
        name = RequestId(f"{request_id}-{index}")
        request = EmbedRequest(
            request_id=name, model=model.base, prompt=prompt.tokens, lora=model.lora, cache_salt=asked.call.cache_salt
        )
        async with at_once:
            return await generator.embed(request, asked.call.hints, deadline)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index, prompt)) for index, prompt in enumerate(prompts)]
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from failures
    vectors = [task.result().vector for task in tasks]
    check_vectors(vectors)
    check_dimensions(asked.dimensions, vectors)
    tokens = sum(prompt.num_tokens for prompt in prompts)
    return EmbeddingsReply(
        data=await embedding_objects(vectors, asked.as_base64),
        model=model.name,
        usage=EmbeddingsUsage(prompt_tokens=tokens, total_tokens=tokens),
    )


def check_fits(prompt: Prompt, model: Model) -> None:
    """Raises ContextLengthError."""
    if prompt.num_tokens > model.context_tokens:
        raise ContextLengthError(
            f"This model's maximum context length is {model.context_tokens} tokens. However, an input has "
            f"{prompt.num_tokens} tokens",
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
