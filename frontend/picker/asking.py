"""Read what a request at the gateway asks for: its model, its prompt as tokens, and what it asks of the mesh.

A picker reads no more than it needs. An endpoint may support parameters that our frontend refuses, so a body that our
parsers do not take is placed by its length alone, and the endpoint says what is wrong with it.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from kvmesh.frontend.bodies import decode_body
from kvmesh.frontend.dialect import Dialect
from kvmesh.frontend.generator import Hints
from kvmesh.frontend.hints import PINS, with_headers
from kvmesh.frontend.models import Model
from kvmesh.frontend.openai import embeddings
from kvmesh.frontend.openai.embeddings import parse_embeddings, read_inputs
from kvmesh.frontend.picker.budget import BodyBudget
from kvmesh.frontend.picker.wire import RequestHead
from kvmesh.frontend.prompts import answer_limit, read_prompts
from kvmesh.frontend.salts import open_salt
from kvmesh.frontend.table import ENDPOINTS
from kvmesh.mesh.http.encodings import decoded, read_encodings
from kvmesh.mesh.http.errors import error_body
from kvmesh.mesh.http.request import PIECES_A_TURN
from kvmesh.protocol.errors import ConfigError, ContextLengthError, InvalidRequestError, MeshError

OBJECTIVE_HEADER = "x-gateway-inference-objective"
FAIRNESS_HEADER = "x-gateway-inference-fairness-id"
REWRITE_HEADER = "x-gateway-model-name-rewrite"
BYTES_PER_TOKEN = 4  # of a body whose prompt is not read
MAX_PRIORITY = 100
NO_PINS = Hints()


class Prompt(NamedTuple):
    """The prompt of a request, as far as it could be read."""

    tokens: bytes  # u32 little endian, of the first prompt; empty: not read
    isl_tokens: int  # of all prompts
    salt: str | None = None
    hints: Hints = NO_PINS  # of the body


class PromptReader(Protocol):
    """Reads the bodies of one path."""

    async def read(self, body: bytes, model: Model) -> Prompt:
        """Return the prompt. Raise InvalidRequestError."""
        ...

    def error_body(self, error: MeshError, request_id: str = "") -> bytes:
        """Return the body of a refusal as the clients of the path read it."""
        ...


class AnswerReader:
    """Reads requests for answers, in any dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self.error_body = dialect.error_body
        self._parse = dialect.parse

    async def read(self, body: bytes, model: Model) -> Prompt:
        parsed = self._parse(body)
        prompts = await read_prompts(parsed, model)
        for prompt in prompts:
            answer_limit(parsed, model.context_tokens, prompt.num_tokens)
        count = sum([prompt.num_tokens for prompt in prompts])
        return Prompt(prompts[0].tokens, count, open_salt(parsed.cache_salt), parsed.hints)


class EmbeddingsReader:
    """Reads requests for vectors."""

    async def read(self, body: bytes, model: Model) -> Prompt:
        parsed = parse_embeddings(body)
        inputs = await read_inputs(parsed, model)
        return Prompt(inputs[0], sum(map(len, inputs)) // 4, open_salt(parsed.cache_salt), parsed.hints)

    def error_body(self, error: MeshError, request_id: str = "") -> bytes:
        return error_body(error)


READERS: Mapping[str, PromptReader] = {
    **{endpoint.path: AnswerReader(endpoint.dialect) for endpoint in ENDPOINTS if endpoint.dialect is not None},
    embeddings.ENDPOINT.path: EmbeddingsReader(),
}


def reader_of(head: RequestHead) -> PromptReader | None:
    """Return the reader of a request that computes something; None: any endpoint can answer it."""
    if head.header(":method") != "POST":
        return None
    return READERS.get((head.header(":path") or "").partition("?")[0])


class BodyReading:
    """Undoes the content encodings of bodies, within the limits of one body and of all together."""

    def __init__(self, max_body_bytes: int, budget: BodyBudget) -> None:
        self._max_body_bytes = max_body_bytes
        self._budget = budget

    async def plain(self, body: bytes, head: RequestHead) -> bytes:
        """Return the body without its encodings. Raise InvalidRequestError, BodyTooLargeError, OverloadedError."""
        encodings = read_encodings(head.header("content-encoding") or "")
        if not encodings:
            return body
        whole = bytearray()
        try:
            for number, piece in enumerate(decoded(body, encodings, self._max_body_bytes), 1):
                self._budget.hold(len(piece))
                whole += piece
                if number % PIECES_A_TURN == 0:
                    await asyncio.sleep(0)  # other requests are served meanwhile
            return bytes(whole)
        finally:
            self._budget.give_back(len(whole))


class _Named(msgspec.Struct):
    model: str
    # How engines hand KV to each other. A client that could send these would have a server read a memory of its choice.
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    disaggregated_params: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None


_named_decoder = msgspec.json.Decoder(_Named)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def model_name(body: bytes) -> str:
    """Return the name of the model that a body asks for.

    Raise InvalidRequestError, also for a field that engines alone may send.
    """
    named = decode_body(body, _named_decoder)
    for field in named.__struct_fields__[1:]:
        if getattr(named, field) is not None:
            raise InvalidRequestError(f"{field} is not for clients to send", hint="leave it out", param=field)
    return named.model


def renamed(body: bytes, model: str) -> bytes:
    """Return the body with another name of its model, and nothing else changed. Raise InvalidRequestError."""
    fields = decode_body(body, _fields_decoder)
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


async def read_prompt(reader: PromptReader, body: bytes, model: Model) -> tuple[Prompt, InvalidRequestError | None]:
    """Return the prompt; where it cannot be read, its length as guessed, and why.

    Raise ContextLengthError if it cannot fit the model's context wherever it goes.
    """
    try:
        return await reader.read(body, model), None
    except ContextLengthError:
        raise
    except InvalidRequestError as error:
        return Prompt(b"", max(1, len(body) // BYTES_PER_TOKEN)), error


def hints_of(given: Hints, head: RequestHead, objectives: Mapping[str, int]) -> Hints:
    """Return what body and headers ask of the mesh, without the workers that they name: that is the picker's part.

    Raise InvalidRequestError that names a header.
    """
    hints = with_headers(given, [(name, value) for name, value in head.headers if name not in PINS])
    priority = objectives.get(head.header(OBJECTIVE_HEADER) or "")
    if priority is not None:
        hints = msgspec.structs.replace(hints, priority=priority)
    if not hints.tenant and (flow := head.header(FAIRNESS_HEADER)):
        hints = msgspec.structs.replace(hints, tenant=flow[:256])
    return msgspec.structs.replace(hints, pin=None, pin_rank=None, pin_prefill=None, explain=False)


def read_objectives(text: str) -> dict[str, int]:
    """Return the priority of each objective in `name=priority,name=priority`. Raise ConfigError."""
    found: dict[str, int] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, _, number = entry.partition("=")
        try:
            found[name.strip()] = priority = int(number)
        except ValueError:
            priority = MAX_PRIORITY + 1
        if not name.strip() or abs(priority) > MAX_PRIORITY:
            raise ConfigError(
                f"--ext-proc-objectives has {entry!r}",
                hint=f"write name=priority, with a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}",
            )
    return found
