"""All that crosses a process boundary. A new field with a default is compatible; else, a new method or tag.

Token ids travel as little-endian u32 bytes (`pack_tokens`): an 8k prompt is one memcpy, not 8k msgpack ints.
"""

from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from protocol.errors import MeshError, WireError, error_class
from protocol.hashing import token_bytes
from protocol.ids import RequestId, WorkerId


class Role(StrEnum):
    """What a worker does for a request. `aggregated` does both halves."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # max_tokens or the model's context is reached


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages: msgpack maps, unknown keys are ignored, so that versions can be mixed."""


class Failure(Message, frozen=True):
    """A MeshError on the wire."""

    code: str
    message: str
    hint: str = ""
    param: str | None = None
    retry_after_s: int | None = None


MAX_ERROR_CHARS = 16 << 10  # of a message or a hint: a peer's error goes into logs and to clients
MAX_PARAM_CHARS = 256
MAX_RETRY_AFTER_S = 86_400


def failure_of(error: MeshError) -> Failure:
    return Failure(
        code=error.code, message=error.message, hint=error.hint, param=error.param, retry_after_s=error.retry_after_s
    )


def error_of(failure: Failure) -> MeshError:
    """Rebuild the error that a peer reported. Texts are cut to a limit, a senseless time to retry is left out."""
    retry_after_s = failure.retry_after_s
    if retry_after_s is not None and not 0 < retry_after_s <= MAX_RETRY_AFTER_S:
        retry_after_s = None
    return error_class(failure.code)(
        failure.message[:MAX_ERROR_CHARS],
        hint=failure.hint[:MAX_ERROR_CHARS],
        param=None if failure.param is None else failure.param[:MAX_PARAM_CHARS],
        retry_after_s=retry_after_s,
    )


class SamplingParams(Message, frozen=True):
    """How a token is chosen. The choice is a pure function of (logits, these, tokens so far): see `seed`."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # u64; token n of the answer draws from (seed, n), so a migrated stream draws the same
    top_logprobs: int | None = None  # None: no logprobs; n >= 0: the chosen token's and the n likeliest
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # no other token can be chosen; empty: all can


class StopConditions(Message, frozen=True):
    max_tokens: int = 16  # of the whole answer, tokens already generated included
    min_tokens: int = 0  # before that many tokens no stop token can be chosen
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end-of-sequence tokens
    ignore_eos: bool = False  # the model's own end-of-sequence tokens do not stop


class GuideKind(StrEnum):
    """What an answer is held to while it is generated."""

    JSON = "json"  # any JSON object; the value is empty
    JSON_SCHEMA = "json_schema"  # the value is the schema, as JSON
    REGEX = "regex"
    GRAMMAR = "grammar"  # in Lark's or the engine's notation
    CHOICE = "choice"  # the value is a JSON list of strings, of which the answer is one


class Guide(Message, frozen=True):
    """Structured output: tokens that would leave the language cannot be chosen."""

    kind: GuideKind
    value: str = ""


class KvLayout(Message, frozen=True):
    """How a worker keeps the KV cache of one block; blocks can move only between equal layouts.

    One block is contiguous: `dtype [num_layers, 2 (k, v), num_kv_heads, block_size, head_dim]`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # "float32", "bfloat16", "float16"

    @property
    def block_bytes(self) -> int:
        item_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * item_bytes


NO_LAYOUT = KvLayout(num_layers=0, num_kv_heads=0, head_dim=0, block_size=0, dtype="")  # equal to no pool's


class Ticket(Message, frozen=True):
    """Lets a decode worker fetch the blocks that a prefill worker offers. Plain data.

    `nonce` is unique to the offer. While the offer stands it is readable in the peer's memory at `slot`;
    a reader that still finds it there after copying knows that the blocks were not reused meanwhile.
    """

    offer_id: int
    worker_id: WorkerId
    address: str  # host:port of the peer's request plane: where to release
    backend: str  # "nixl", "shm", or what engines that move KV themselves call it: "vllm-nixl"
    nonce: int  # u63, never 0
    slot: int = -1
    peer: bytes = b""  # the backend's own description of the peer
    layout: KvLayout = NO_LAYOUT
    block_ids: tuple[int, ...] = ()  # at the peer, in prompt order; the last may be partly filled
    num_tokens: int = 0  # tokens whose KV the blocks hold
    opaque: bytes = b""  # what engines that move KV themselves tell each other; then slot to block_ids say nothing


class GenerateRequest(Message, frozen=True):
    """One answer to compute: worker method `generate`, answered by a stream of `Delta`."""

    request_id: RequestId
    model: str
    prompt: bytes  # u32 little endian, see pack_tokens
    generated: tuple[int, ...] = ()  # tokens of the answer that exist already: from prefill, or before migration
    sampling: SamplingParams = SamplingParams()
    stop: StopConditions = StopConditions()
    lora: str | None = None
    cache_salt: str | None = None
    guide: Guide | None = None
    offer_kv: bool = False  # prefill leg: keep the prompt's blocks and answer with a ticket
    ticket: Ticket | None = None  # decode leg: fetch these blocks first
    dp_rank: int = 0  # of the worker, where it has several


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


class PullReport(msgspec.Struct, frozen=True, array_like=True):
    """How the prompt's KV came to the decode worker."""

    backend: str
    num_bytes: int
    num_blocks: int
    duration_s: float
    error: str = ""  # not empty: the pull failed for this reason and the worker computed the prompt itself


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """What one engine step adds to one stream."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None  # set in the last delta of a stream, and only there
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token of token_ids, where asked for
    cached_tokens: int | None = None  # first delta: prompt tokens found in this worker's prefix cache
    ticket: Ticket | None = None  # last delta of a prefill leg that has to go on elsewhere
    pull: PullReport | None = None  # first delta of a decode leg with a ticket
    stop_token: int | None = None  # the stop token that ended the answer; it is part of token_ids


class Feature(StrEnum):
    """What not every engine can do; a request that needs one it has not is refused by name."""

    LOGPROBS = "logprobs"
    LOGIT_BIAS = "logit_bias"
    ALLOWED_TOKENS = "allowed_tokens"
    GUIDED = "guided"  # structured output
    EMBEDDINGS = "embeddings"
    COMPLETIONS = "completions"  # it generates


class WorkerCard(Message, frozen=True):
    """What a worker tells the mesh about itself through discovery, under `workers/<worker_id>`."""

    worker_id: WorkerId
    name: str  # stable over restarts, e.g. "decode-0"
    role: Role
    model: str
    model_path: str  # a folder with tokenizer.json, readable by the frontend
    address: str  # host:port of the request plane
    block_size: int
    total_blocks: int
    context_tokens: int
    max_num_seqs: int = 64
    kv_events: str = ""  # tcp://host:port (ZMQ) or nats://host:port/subject; "" if the worker publishes none
    kv_replay: str = ""  # ZMQ alone
    rank_kv_events: tuple[tuple[str, str], ...] = ()  # (kv_events, kv_replay) of data-parallel ranks 1, 2, ...
    transfer: str = ""  # backend that can move its KV; prefill and decode must agree
    dp_size: int = 1  # total_blocks, max_num_seqs: of each rank
    # Speed against the other workers of its role: one of 2 is given twice the work.
    capacity: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    pid: int = 0
    metrics_url: str = ""
    features: tuple[Feature, ...] = ()
    loras: tuple[str, ...] = ()  # names of adapters, served as models of their own
    tool_parser: str = ""  # how the model writes tool calls; "": to be guessed from its chat template
    reasoning_parser: str = ""  # how it sets its thoughts apart; "": the same


class RouterCard(Message, frozen=True):
    """A router, alone or inside a frontend, under `routers/<name>`."""

    name: str
    address: str = ""  # host:port of its request plane; "": it answers nobody but its own process
    gossip: str = ""  # ZMQ endpoint where it publishes the load it has placed; "": it does not
    http_url: str = ""
    pid: int = 0


class FrontendCard(Message, frozen=True):
    """A frontend, under `frontends/<name>`."""

    name: str
    url: str
    pid: int = 0


class RouteRequest(Message, frozen=True):
    """Where should this run? Router method `place`: the stream that answers it is the booking's lease."""

    request_id: RequestId
    model: str
    isl_tokens: int
    sequence_hashes: bytes = b""  # u64 little endian, one per full block of the prompt, in order: see pack_hashes
    exclude: tuple[WorkerId, ...] = ()  # workers that just failed this request
    disaggregate: bool | None = None  # None: the router decides
    pin: WorkerId | None = None  # decode there, or fail; a worker's id or name
    pin_rank: int | None = None  # ... in this data-parallel rank
    pin_prefill: WorkerId | None = None  # prefill there, or fail
    lora: str | None = None  # only workers that have it
    session: str = ""  # requests of one session go to one worker while that can take them; "": none
    tenant: str = ""  # who shares the queue with whom, fairly
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0  # the higher goes first
    explain: bool = False  # answer with the reasons


class Target(Message, frozen=True):
    worker_id: WorkerId
    name: str
    address: str
    dp_rank: int = 0
    overlap_blocks: int = 0  # of the prompt, already in this worker's cache by the router's index


class CandidateReport(Message, frozen=True):
    """One (worker, dp rank) as the router saw it when it chose. Blocks are KV blocks, costs are in blocks."""

    leg: str  # "whole", "prefill" or "decode": what it was to compute
    worker: str
    dp_rank: int
    overlap_blocks: tuple[int, int, int, int]  # leading blocks on the device, there or in host memory, ... disk, any
    queued_tokens: int  # placed there, still to prefill
    held_blocks: int  # by what runs there
    requests: int
    capacity: float
    cost: float
    terms: dict[str, float]  # what the cost is made of, before it is divided by the capacity
    note: str = ""  # "chosen", or why it could not be


class Explanation(Message, frozen=True):
    """Why a request runs where it does. The cheapest candidates first, at most 64 of each leg."""

    policy: str
    why: str
    recompute_price: float  # what a block to compute counts against a block in the queue
    busy_share: float  # of the workers' time, spent on prefill lately
    asked_before: float  # requests of the last minutes whose cached prefix ended where this one's does
    waited_s: float = 0.0  # in the router's queue
    would_wait: bool = False  # a preview: there, because the workers are saturated
    candidates: tuple[CandidateReport, ...] = ()


class Placed(Message, frozen=True):
    """`prefill` is None when one worker does both halves."""

    decode: Target
    prefill: Target | None = None
    reason: str = ""
    explanation: Explanation | None = None  # where the request asked for it


class Progress(Message, frozen=True):
    """Router method `progress`: a booking lives, and holds this much of an answer by now."""

    request_id: RequestId
    osl_tokens: int = 0
    has_begun: bool = False  # the first token is there
    reused_tokens: int | None = None  # of the prompt, found in the worker's cache: told with the first token


class Resume(Message, frozen=True):
    """Router method `resume`: another router placed this and is gone; it runs. Answered like `place`."""

    request: RouteRequest
    placed: Placed
    progress: Progress


class EmbedRequest(Message, frozen=True):
    """One vector to compute: worker method `embed`, answered by one `Embedding`."""

    request_id: RequestId
    model: str
    prompt: bytes  # u32 little endian, see pack_tokens
    lora: str | None = None
    cache_salt: str | None = None
    dp_rank: int = 0


class Embedding(Message, frozen=True):
    vector: bytes  # float32 little endian, of length 1


class ReleaseOffer(Message, frozen=True):
    """Worker method `release`: unpin an offer. Unknown or released offers are no error."""

    offer_id: int
    nonce: int


class ControlAction(StrEnum):
    """What an operator can ask of an engine that is able to."""

    RESET_PREFIX_CACHE = "reset_prefix_cache"
    SLEEP = "sleep"  # take no work; arguments: level
    WAKE = "wake"
    START_PROFILE = "start_profile"
    STOP_PROFILE = "stop_profile"
    LOAD_LORA = "load_lora"  # arguments: name, path
    UNLOAD_LORA = "unload_lora"  # arguments: name
    LIST_LORAS = "list_loras"
    SET_ROLE = "set_role"  # arguments: role; the worker leaves and comes back under another id, its cache kept


class Control(Message, frozen=True):
    """Worker method `control`, answered by one `ControlReply`."""

    action: ControlAction
    arguments: dict[str, str] = {}


class ControlReply(Message, frozen=True):
    detail: str = ""  # what was done, for people
    loras: tuple[str, ...] = ()  # names of the adapters that are there now
    worker_id: WorkerId | None = None  # set_role: under which it is in the mesh now


class KvRank(Message, frozen=True):
    """Asks `kv_snapshot` and `kv_digest` for one data-parallel rank; None asks for the first."""

    dp_rank: int = 0


class KvSnapshot(Message, frozen=True):
    """Worker method `kv_snapshot`: a part of all that a worker's cache holds, in the format of its KV events."""

    seq: int  # of the last batch of events that the snapshot contains; -1: none was published
    payload: bytes


class KvDigest(Message, frozen=True):
    """Worker method `kv_digest`: what its cache holds after batch `seq` of its KV events, as a hash of the set."""

    seq: int  # -1: before the first
    blocks: int
    value: int  # u64, see protocol.hashing.digest_term


T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The exceptions that msgspec raises for bytes that are no value of the expected type."""


def encode(message: object) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """Read one message. Raises WireError; the sender is named by the caller's log context."""
    try:
        return decoder(kind).decode(data)
    except UNREADABLE as error:
        raise unreadable(kind, error) from error


_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}  # as many as there are kinds of messages


def decoder(kind: type[T]) -> "msgspec.msgpack.Decoder[T]":
    """Return the decoder of one kind of message, for callers with many. `unreadable` explains its exceptions."""
    if (known := _decoders.get(kind)) is None:
        known = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return known


def unreadable(kind: type, error: Exception) -> WireError:
    return WireError(f"unreadable {kind.__name__}: {error}", hint="run one version everywhere")


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return token_bytes(tokens)


def unpack_tokens(data: bytes) -> list[int]:
    """Raises WireError if `data` is not whole u32s."""
    return token_array(data).tolist()


def token_array(data: bytes) -> "array[int]":
    """The same as an array of u32: a fraction of the memory, and slices are copied as bytes."""
    if len(data) % 4:
        raise WireError(f"a prompt of {len(data)} bytes is not a list of u32 tokens", hint="see pack_tokens")
    tokens = array("I")
    tokens.frombytes(data)
    return tokens
