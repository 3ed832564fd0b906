"""Define the messages between processes. A new field with a default is compatible; else add a method or a tag.

Token ids travel as little-endian u32 bytes (`pack_tokens`): an 8k prompt is one memcpy, not 8k msgpack ints.
"""

from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvmesh.protocol.errors import MeshError, WireError, error_class
from kvmesh.protocol.hashing import token_bytes
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.kv_content import MAX_ADAPTERS, MAX_CONTENT_CHARS, UNKNOWN, content_of
from kvmesh.protocol.model_files import ModelFile
from kvmesh.protocol.version import (
    NEIGHBOURS,
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    RELEASE,
    UNNAMED_PROTOCOL,
    Versions,
    common_version,
)


class Role(StrEnum):
    """The half of a request that a worker computes. An aggregated worker computes both."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def noun(self) -> str:
        """Return what a sentence calls such a worker: `an aggregated worker`."""
        return f"{'an' if self is Role.AGGREGATED else 'a'} {self.value} worker"


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's context is reached


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The base of all messages: msgpack maps. Unknown keys are ignored, so that versions can be mixed."""


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
    """The rules by which a token is chosen: a pure function of the logits, these values and the tokens so far."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # u64; token n of the answer draws from (seed, n), so that a migrated stream draws the same tokens
    top_logprobs: int | None = None  # None: no logprobs; n >= 0: of the chosen token and of the n likeliest
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # only these can be chosen; empty: all can
    prompt_logprobs: int | None = None  # n >= 0: logprobs of the prompt's tokens, too; top_logprobs is set then


class StopConditions(Message, frozen=True):
    max_tokens: int = 16  # of the whole answer, tokens already generated included
    min_tokens: int = 0  # no stop token can be chosen before the answer has so many tokens
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end-of-sequence tokens
    ignore_eos: bool = False  # the model's own end-of-sequence tokens do not end the answer


class GuideKind(StrEnum):
    """The kinds of language that an answer can be held to while it is generated."""

    JSON = "json"  # any JSON object; the value is empty
    JSON_SCHEMA = "json_schema"  # the value is the schema, as JSON
    REGEX = "regex"
    GRAMMAR = "grammar"  # in Lark's or the engine's notation
    CHOICE = "choice"  # the value is a JSON list of strings, of which the answer is one


class Guide(Message, frozen=True):
    """The language of a structured output: a token that would leave the language cannot be chosen."""

    kind: GuideKind
    value: str = ""


class KvLayout(Message, frozen=True):
    """The layout of one block of a worker's KV cache. Blocks can move only between equal layouts.

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


NO_LAYOUT = KvLayout(num_layers=0, num_kv_heads=0, head_dim=0, block_size=0, dtype="")  # equal to the layout of no pool


class Ticket(Message, frozen=True):
    """The data with which a decode worker fetches the blocks that a prefill worker offers.

    `nonce` is unique to the offer. While the offer stands it is readable in the peer's memory at `slot`;
    a reader that still finds the nonce there after copying knows that the blocks were not reused meanwhile.
    """

    offer_id: int
    worker_id: WorkerId
    address: str  # host:port of the peer's request plane: where to release
    backend: str  # "nixl", "shm", or a name such as "vllm-nixl" of an engine that moves KV itself
    nonce: int  # u63, never 0
    slot: int = -1
    peer: bytes = b""  # the backend's own description of the peer
    layout: KvLayout = NO_LAYOUT
    block_ids: tuple[int, ...] = ()  # at the peer, in prompt order; the last block may be partly filled
    num_tokens: int = 0  # tokens whose KV the blocks hold
    secret: Annotated[bytes, Meta(max_length=64)] = b""  # 128 random bits of a sealed ticket: the rest is at the peer
    opaque: bytes = b""  # of engines that move KV themselves; then slot, peer, layout and block_ids are not set
    content: Annotated[str, Meta(max_length=MAX_CONTENT_CHARS)] = UNKNOWN  # what the KV was computed with


class PrefixSource(Message, frozen=True):
    """Name a worker that holds the beginning of a prompt, for a worker that may pull it instead of computing it."""

    worker_id: Annotated[str, Meta(max_length=256)]
    name: Annotated[str, Meta(max_length=256)]
    address: Annotated[str, Meta(max_length=256)]  # host:port of its request plane
    dp_rank: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    blocks: Annotated[int, Meta(ge=0, le=1 << 24)] = 0  # leading blocks of the prompt on its device, by the index


class GenerateRequest(Message, frozen=True):
    """A request to compute one answer: worker method `generate`, answered by a stream of `Delta`."""

    request_id: RequestId
    model: str
    prompt: bytes  # u32 little endian, see pack_tokens
    generated: tuple[int, ...] = ()  # existing tokens of the answer: from prefill, or from before a migration
    sampling: SamplingParams = SamplingParams()
    stop: StopConditions = StopConditions()
    lora: str | None = None
    cache_salt: str | None = None
    guide: Guide | None = None
    offer_kv: bool = False  # prefill leg: keep the prompt's blocks and answer with a ticket
    kv_for: Annotated[str, Meta(max_length=256)] = ""  # ... for the worker of this name
    ticket: Ticket | None = None  # decode leg: fetch these blocks first
    source: PrefixSource | None = None  # whoever computes the prompt may pull its beginning from there
    dp_rank: int = 0  # of a worker that has several
    worker_id: WorkerId = WorkerId(
        ""
    )  # the worker that is meant: any other one at its address refuses; "": whoever is there
    # Of the request's trace, in W3C's form; "": it has none. Where it has, the last delta is a TimedDelta.
    traceparent: Annotated[str, Meta(max_length=256)] = ""
    tracestate: Annotated[str, Meta(max_length=512)] = ""
    tenant: Annotated[str, Meta(max_length=256)] = ""  # whose share of what is limited per tenant it uses
    # The content by which the worker was chosen: a worker that computes with another one refuses.
    content: Annotated[str, Meta(max_length=MAX_CONTENT_CHARS)] = UNKNOWN


MAX_PREFIX_BLOCKS = 8192  # of a prompt, that one worker offers another: each is named and compared
MAX_PROMPT_LOGPROBS = 1 << 19  # of one prompt, those of the likeliest tokens included: some 10 MB on the wire


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


class PullReport(msgspec.Struct, frozen=True, array_like=True):
    """A report on how KV of the prompt came to a worker: from its prefill worker, or from a peer."""

    backend: str
    num_bytes: int
    num_blocks: int
    duration_s: float
    error: str = ""  # why the pull failed, and the worker computed the prompt itself; "": it did not fail


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """The part of an answer that one engine step adds to one stream."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None  # set in the last delta of a stream, and only there
    # One per token of token_ids, where asked for. Any before these belong to the prompt: its tokens from the second on,
    # in order, over one or more deltas; the last of them come with the first token or before it.
    logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int | None = None  # prompt tokens found in this worker's cache; with the first token, or the last
    ticket: Ticket | None = None  # last delta of a prefill leg whose answer continues at a decode worker
    pull: PullReport | None = None  # first delta of a request whose KV was pulled, or should have been
    stop_token: int | None = None  # the stop token that ended the answer; it is part of token_ids


class WorkerTimes(msgspec.Struct, frozen=True, array_like=True):
    """Report how a worker spent its time on a request that belongs to a trace, from when the request came."""

    queued_s: float = 0.0  # until its first step or pull
    first_s: float = 0.0  # until its first token
    total_s: float = 0.0  # until its last one
    preemptions: int = 0


class TimedDelta(Delta, frozen=True, array_like=True):
    """The last delta of a request that belongs to a trace. Older releases read it as a Delta."""

    times: WorkerTimes | None = None


class Feature(StrEnum):
    """A feature that some engines lack. A request for a feature that the engine lacks is refused by its name."""

    LOGPROBS = "logprobs"
    LOGIT_BIAS = "logit_bias"
    ALLOWED_TOKENS = "allowed_tokens"
    GUIDED = "guided"  # structured output
    EMBEDDINGS = "embeddings"
    COMPLETIONS = "completions"  # the engine generates
    PROMPT_LOGPROBS = "prompt_logprobs"


class Card(Message, frozen=True, kw_only=True):
    """The base of the descriptions in discovery. A card of a release that names no version has UNNAMED_PROTOCOL."""

    protocol: int = UNNAMED_PROTOCOL
    oldest_protocol: int = UNNAMED_PROTOCOL  # of the peers that its process understands
    release: Annotated[str, Meta(max_length=64)] = ""

    @property
    def versions(self) -> Versions:
        return Versions(self.protocol, self.oldest_protocol, self.release)


class CardTier(Message, frozen=True):
    """A tier of a worker's KV cache below the device. Times are 0 while nothing was measured."""

    tier: Annotated[int, Meta(ge=1, le=3)]  # a kvmesh.protocol.tiers.Tier
    blocks: Annotated[int, Meta(ge=0, le=1 << 40)]  # that it can hold, of each rank
    block_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0  # time to bring one block back
    latency_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0  # before the first one


class WorkerCard(Card, frozen=True):
    """The description of a worker in discovery, under `workers/<worker_id>`."""

    worker_id: WorkerId
    name: str  # stable over restarts, e.g. "decode-0"
    role: Role
    model: str
    model_path: str  # its folder, on its host
    address: str  # host:port of the request plane
    block_size: int
    total_blocks: int
    context_tokens: int
    max_num_seqs: int = 64
    kv_events: str = ""  # tcp://host:port (ZMQ) or nats://host:port/subject; "" if the worker publishes none
    kv_replay: str = ""  # ZMQ alone
    rank_kv_events: tuple[tuple[str, str], ...] = ()  # (kv_events, kv_replay) of data-parallel ranks 1, 2, ...
    kv_key: str = ""  # public key of these ZMQ sockets (CURVE, Z85); "": they are open to everybody
    transfer: str = ""  # backend that moves the worker's KV; prefill and decode workers must agree
    dp_size: int = 1  # total_blocks, max_num_seqs: of each rank
    # Speed against the other workers of its role: one of 2 is given twice the work.
    capacity: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    pid: int = 0
    metrics_url: str = ""
    http_endpoint: str = ""  # ip:port where OpenAI's API of this worker answers; "": nowhere that gateways may use
    reports_load: bool = False  # it answers `load`
    retokenizes: bool = False  # see Target.retokenizes
    features: tuple[str, ...] = ()  # each a Feature; one that a newer release has added is ignored
    loras: tuple[str, ...] = ()  # names of adapters, served as models of their own
    tool_parser: str = ""  # how the model writes tool calls; "": guess from its chat template
    reasoning_parser: str = ""  # how the model sets its thoughts apart; "": guess from its chat template
    model_files: Annotated[tuple[ModelFile, ...], Meta(max_length=16)] = ()  # what it answers `model_file` with
    resting: Annotated[str, Meta(max_length=32)] = (
        ""  # its state while it takes no requests, as "drained" or "asleep"; "": it serves
    )
    tiers: Annotated[tuple[CardTier, ...], Meta(max_length=3)] = ()  # below the device, the fastest first
    prefill_token_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0  # time to compute one token of a prompt; 0: unknown
    # Workers with equal prints have KV of equal bytes for equal prompts, and pull it from each other; "": it does not.
    kv_print: Annotated[str, Meta(max_length=64)] = ""
    # A hash of all weights and of what else changes KV, see protocol/kv_content.py: KV moves between equal ones alone.
    content_fingerprint: Annotated[str, Meta(max_length=MAX_CONTENT_CHARS)] = UNKNOWN
    adapter_fingerprints: Annotated[
        tuple[tuple[str, Annotated[str, Meta(max_length=MAX_CONTENT_CHARS)]], ...], Meta(max_length=MAX_ADAPTERS)
    ] = ()
    pull_block_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0  # time to pull one block from a peer; 0: not measured
    pull_latency_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0  # before the first one

    def content_of(self, lora: str | None) -> str:
        """Return the fingerprint of the worker's KV for requests of one adapter, or of none."""
        return content_of(self.content_fingerprint, self.adapter_fingerprints, lora)

    def target(self, dp_rank: int, overlap_blocks: int = 0, lora: str | None = None) -> "Target":
        """Return the worker as the target of a placement, for a request of one adapter or of none."""
        return Target(
            worker_id=self.worker_id,
            name=self.name,
            address=self.address,
            dp_rank=dp_rank,
            overlap_blocks=overlap_blocks,
            retokenizes=self.retokenizes,
            content=self.content_of(lora),
        )


class RouterCard(Card, frozen=True):
    """The description of a router, alone or inside a frontend, under `routers/<name>`."""

    name: str
    address: str = ""  # host:port of its request plane; "": it answers only its own process
    gossip: str = ""  # ZMQ endpoint where it publishes its bookings; "": it publishes none
    gossip_key: str = ""  # public key of its gossip (CURVE, Z85), to follow it and to let it follow; "": it is open
    http_url: str = ""
    pid: int = 0


class FrontendCard(Card, frozen=True):
    """The description of a frontend, under `frontends/<name>`."""

    name: str
    url: str
    pid: int = 0
    mesh_url: str = ""  # of /metrics and the full /health, for members of a closed mesh

    @property
    def observed_url(self) -> str:
        """Return the URL for members of the mesh."""
        return self.mesh_url or self.url


class PlannerCard(Card, frozen=True):
    """The card of a planner, under `planners/<start time>-<random>`. The planner with the first key acts."""

    name: str
    pid: int = 0
    metrics_url: str = ""
    record_file: str = ""
    connector: str = ""


class RoleCount(Message, frozen=True, array_like=True):
    """The workers of one role that a planner sees, and the number that it wants."""

    ready: int = 0
    starting: int = 0
    draining: int = 0
    ordered: int = 0  # by the decision: ready and starting


class PlannerStep(Message, frozen=True):
    """A step of a planner, for those who look: what it saw, what it wants, and why. None: not known."""

    ts_s: float  # wall clock
    mode: str = ""  # active or shadow
    loop: str = ""
    prefill: RoleCount = RoleCount()
    decode: RoleCount = RoleCount()
    requests_per_s: float | None = None  # that came
    forecast_per_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    reasons: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    applied: bool = False  # something was ordered
    error: str = ""  # why an order failed


MAX_PLANNER_STEPS = 120


class PlannerSteps(Message, frozen=True):
    """The last steps of a planner, oldest first: the answer to GET /steps, as JSON."""

    steps: Annotated[tuple[PlannerStep, ...], Meta(max_length=MAX_PLANNER_STEPS)] = ()


class LimiterCard(Card, frozen=True):
    """The description of a frontend that shares the limits of API keys, under `limiters/<name>`."""

    name: Annotated[str, Meta(max_length=256)]
    address: Annotated[str, Meta(max_length=256)]  # host:port of its request plane
    pid: int = 0


MAX_BUDGET_RETURNS = 256
Amount = Annotated[int, Meta(ge=0, le=2**53)]
KeyLimit = Annotated[int, Meta(ge=1, le=2**53)] | None


class BudgetReturn(Message, frozen=True, array_like=True):
    """A part of a lease that was not used, for the slot of time in which it was granted."""

    slot: int
    requests: Amount
    tokens: Amount


class BudgetUse(Message, frozen=True, array_like=True):
    """A use that still counts."""

    age_s: Annotated[float, Meta(ge=0, le=120)]
    requests: Amount
    tokens: Amount


class BudgetAsk(Message, frozen=True):
    """A request for a lease of what an API key may use: frontend method `budget`, asked of the key's owner."""

    key: Annotated[str, Meta(max_length=512)]  # its name
    asker: Annotated[str, Meta(max_length=256)]
    owner: Annotated[str, Meta(max_length=256)]  # that is meant: another process may have the address now
    limit_requests: KeyLimit = None
    limit_tokens: KeyLimit = None
    limit_streams: KeyLimit = None
    need_requests: Amount = 0  # without so many the asker is not helped
    need_tokens: Amount = 0
    want_requests: Amount = 0  # what it can use soon
    want_tokens: Amount = 0
    epoch: int = 0  # of the owner that granted what is returned
    returned: Annotated[tuple[BudgetReturn, ...], Meta(max_length=MAX_BUDGET_RETURNS)] = ()
    debt_tokens: Amount = 0  # that were used beyond leases
    handed: Annotated[tuple[BudgetUse, ...], Meta(max_length=MAX_BUDGET_RETURNS)] = ()  # by the owner before
    streams: Amount = 0  # in progress at the asker
    want_streams: Amount = 0


class BudgetGrant(Message, frozen=True):
    """The answer to BudgetAsk: the lease, and what is left of the limits."""

    epoch: int = 0
    slot: int = 0
    requests: Amount = 0
    tokens: Amount = 0
    streams: Amount = 0
    lacking: str = ""  # the limit that is reached, "" if none
    wait_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    left_requests: Amount = 0
    left_tokens: Amount = 0
    reset_requests_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    reset_tokens_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class DownCard(Message, frozen=True):
    """A worker that ends again and again, under `down/<name>`. Put by the owner of its process."""

    name: str
    role: Role
    retry_s: Annotated[float, Meta(ge=0, le=86_400)]  # until its owner starts it again


class KeptCard(Message, frozen=True):
    """The names of the workers that one owner of processes starts again when they end, under `kept/<owner>`."""

    workers: tuple[Annotated[str, Meta(max_length=256)], ...] = ()


class RouteRequest(Message, frozen=True):
    """A request to place a prompt: router method `place`. The stream of the answer is the lease of the booking."""

    request_id: RequestId
    model: str
    isl_tokens: int
    sequence_hashes: bytes = b""  # u64 little endian, one per full block of the prompt, in order: see pack_hashes
    exclude: tuple[WorkerId, ...] = ()  # workers that just failed this request
    disaggregate: bool | None = None  # None: the router decides
    among: tuple[WorkerId, ...] | None = None  # ids of the only workers that may decode; None: all
    pin: WorkerId | None = None  # id or name of the only worker that may decode
    pin_rank: int | None = None  # the only data-parallel rank of that worker that may decode
    pin_prefill: WorkerId | None = None  # the only worker that may prefill
    lora: str | None = None  # only workers that serve this adapter can be chosen
    session: str = ""  # requests of one session go to one worker while that worker can take them; "": no session
    tenant: str = ""  # tenants share the queue fairly
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0  # a higher value goes first
    explain: bool = False  # answer with the reasons
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] = 0  # of the answer, that may still come; 0: not known
    has_deadline: bool = False  # the client has named the time that it waits for the whole answer
    is_continued: bool = False  # a part of its answer is there: it is not refused
    # With which that part was computed: only an equal one continues it.
    content: Annotated[str, Meta(max_length=MAX_CONTENT_CHARS)] = UNKNOWN


class Target(Message, frozen=True):
    worker_id: WorkerId
    name: str
    address: str
    dp_rank: int = 0
    overlap_blocks: int = 0  # blocks of the prompt in this worker's cache, by the router's index
    retokenizes: bool = False  # it makes tokens of a server's texts: more, or fewer, than the server has counted
    content: Annotated[str, Meta(max_length=MAX_CONTENT_CHARS)] = UNKNOWN  # what it computes with, by its card


class CandidateReport(Message, frozen=True):
    """The router's view of one (worker, dp rank) when it chose. Blocks are KV blocks, costs are in blocks."""

    leg: str  # "whole", "prefill" or "decode": what it was to compute
    worker: str
    dp_rank: int
    overlap_blocks: tuple[int, int, int, int]  # leading blocks on the device, or host memory too, or disk too, anywhere
    queued_tokens: int  # placed there, still to prefill
    held_blocks: int  # by what runs there
    requests: int
    capacity: float
    cost: float
    terms: dict[str, float]  # the parts of the cost, before it is divided by the capacity
    note: str = ""  # "chosen", or why it could not be chosen
    unbooked_tokens: int = 0  # of queued_tokens: reported by the worker, in no router's bookings
    unbooked_blocks: int = 0  # of held_blocks
    unbooked_requests: int = 0  # of requests


class Explanation(Message, frozen=True):
    """The reasons for a placement, with the cheapest candidates first, at most 64 for each leg."""

    policy: str
    why: str
    recompute_price: float  # cost of a block to compute, where a block in the queue costs 1
    busy_share: float  # share of the workers' recent time that prefill took
    asked_before: float  # recent requests whose cached prefix ended at the same block
    waited_s: float = 0.0  # in the router's queue
    would_wait: bool = False  # a preview: the request would wait, because the workers are saturated
    first_s: float = 0.0  # estimated from the placement to the first token; 0: not known
    total_s: float = 0.0  # ... to the last one
    candidates: tuple[CandidateReport, ...] = ()


class Placed(Message, frozen=True):
    """A placement. `prefill` is None when one worker does both halves."""

    decode: Target
    prefill: Target | None = None
    reason: str = ""
    explanation: Explanation | None = None  # if the request asked for an explanation
    source: PrefixSource | None = None  # from where the worker that computes the prompt pulls its beginning


class Progress(Message, frozen=True):
    """A report that a booking lives, and how long its answer is now: router method `progress`."""

    request_id: RequestId
    osl_tokens: int = 0
    has_begun: bool = False  # the first token has come
    reused_tokens: int | None = None  # prompt tokens found in the worker's cache; reported with the first token
    has_finished: bool = False  # the answer is complete; only a sample of answers is reported so


class Resume(Message, frozen=True):
    """A request to take over a running request whose router is gone: router method `resume`, answered like `place`."""

    request: RouteRequest
    placed: Placed
    progress: Progress


class EmbedRequest(Message, frozen=True):
    """A request to compute one vector: worker method `embed`, answered by one `Embedding`."""

    request_id: RequestId
    model: str
    prompt: bytes  # u32 little endian, see pack_tokens
    lora: str | None = None
    cache_salt: str | None = None
    dp_rank: int = 0
    worker_id: WorkerId = WorkerId("")  # as in GenerateRequest
    traceparent: Annotated[str, Meta(max_length=256)] = ""  # as in GenerateRequest
    tracestate: Annotated[str, Meta(max_length=512)] = ""


class Embedding(Message, frozen=True):
    vector: bytes  # float32 little endian, of length 1


class ReleaseOffer(Message, frozen=True):
    """A request to unpin an offer: worker method `release`. An unknown or released offer is no error."""

    offer_id: int
    nonce: int
    secret: Annotated[bytes, Meta(max_length=64)] = b""  # of a sealed ticket; it then stands for both


class RedeemTicket(Message, frozen=True):
    """Ask a worker what a sealed ticket of it stands for: worker method `redeem`, answered by one `OpenedTicket`."""

    secret: Annotated[bytes, Meta(max_length=64)]


class OpenedTicket(Message, frozen=True):
    ticket: Ticket


class OfferPrefix(Message, frozen=True):
    """Ask a worker for KV that its cache holds: worker method `offer_prefix`, answered by one `OfferedPrefix`.

    The blocks stay pinned as long as the call, and no longer than a lease.
    """

    model: Annotated[str, Meta(max_length=256)]
    worker_id: Annotated[str, Meta(max_length=256)]  # the worker that is meant: any other one at its address refuses
    names: Annotated[bytes, Meta(max_length=8 * MAX_PREFIX_BLOCKS)]  # sequence hashes from the first block on
    first: Annotated[int, Meta(ge=0, le=MAX_PREFIX_BLOCKS)] = 0  # number of the first block that is wanted
    dp_rank: Annotated[int, Meta(ge=0, le=1 << 16)] = 0


class OfferedPrefix(Message, frozen=True):
    """Offer the wanted blocks that are here, perhaps fewer than were asked for, or none.

    `address` is the content address of the last block: 256 bits that stand for model, layout, weights, adapter, salt
    and all tokens up to its end. Whoever finds another address for its own prompt must not use the blocks.
    """

    ticket: Ticket | None = None  # None: no wanted block is here
    address: Annotated[bytes, Meta(max_length=32)] = b""


class ControlAction(StrEnum):
    """The actions that an operator can ask of an engine. Not every engine has each."""

    RESET_PREFIX_CACHE = "reset_prefix_cache"
    SLEEP = "sleep"  # take no work; arguments: level
    WAKE = "wake"
    START_PROFILE = "start_profile"
    STOP_PROFILE = "stop_profile"
    LOAD_LORA = "load_lora"  # arguments: name, path
    UNLOAD_LORA = "unload_lora"  # arguments: name
    LIST_LORAS = "list_loras"
    SET_ROLE = "set_role"  # arguments: role; the worker leaves and joins again under another id, with its cache
    STATUS = "status"
    DRAIN = "drain"  # finish what runs and take nothing more, until RESUME
    RESUME = "resume"
    LOG_LEVEL = "log_level"  # arguments: level


class Control(Message, frozen=True):
    """A request of an operator: worker method `control`, answered by one `ControlReply`."""

    action: ControlAction
    arguments: dict[str, str] = {}


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a worker as the worker itself sees it."""

    state: str  # a value of kvmesh.workers.states.WorkerState
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    is_profiling: bool = False
    log_level: str = ""
    quiet_s: float = 0.0  # since its engine last gave a token
    problem: str = ""  # what is wrong with its engine or its KV events, "" for nothing


class ControlReply(Message, frozen=True):
    detail: str = ""  # says what was done
    loras: tuple[str, ...] = ()  # names of the adapters that are loaded now
    worker_id: WorkerId | None = None  # set_role: the worker's new id
    status: WorkerStatus | None = None  # status: how the worker is


class KvRank(Message, frozen=True):
    """The rank that `kv_snapshot` and `kv_digest` are asked for. A call without it asks for the first."""

    dp_rank: int = 0


class EventKeyRequest(Message, frozen=True):
    """Ask a worker to admit a follower of its KV events: worker method `event_key`, answered by one `EventKey`.

    The follower's key counts while the call is open, so the call lasts as long as the follower.
    """

    key: Annotated[str, Meta(max_length=64)]  # the follower's public key (CURVE, Z85)


class EventKey(Message, frozen=True):
    """Tell a follower, who is now admitted, the key of this worker's events; its card has the same."""

    worker_id: WorkerId
    key: Annotated[str, Meta(max_length=64)]


class ModelFileRequest(Message, frozen=True):
    """Ask a worker for one of its `WorkerCard.model_files`: worker method `model_file`."""

    sha256: Annotated[str, Meta(max_length=64)]


class ModelFilePart(Message, frozen=True):
    """A part of a file, in order: the answer of worker method `model_file`."""

    data: bytes


class KvSnapshot(Message, frozen=True):
    """A part of a worker's cache, in the format of its KV events: the answer of worker method `kv_snapshot`."""

    seq: int  # last batch of events in the snapshot; -1: none was published
    payload: bytes


class WorkerIdentity(Message, frozen=True):
    """Name the worker that answers at an address now: the answer of worker method `identify`."""

    worker_id: WorkerId


class RouterIdentity(Message, frozen=True):
    """Name the router that answers at an address now: the answer of router method `identify`."""

    name: str


MOST_PROBE_BYTES = 64 << 20


class Clock(Message, frozen=True):
    """Say what a service's clock shows: the answer of the method `clock` of workers and routers."""

    unix_s: float


class ProbePeer(Message, frozen=True):
    """A request to report on the way to a peer: the method `probe_peer` of workers and routers. One runs at a time."""

    address: Annotated[str, Meta(max_length=256)]  # of the peer's request plane
    transfer: Annotated[str, Meta(max_length=16)] = ""  # "nixl" or "shm": read memory of the peer too; workers alone
    num_bytes: Annotated[int, Meta(ge=1 << 20, le=MOST_PROBE_BYTES)] = 16 << 20


class PeerProbe(Message, frozen=True):
    """Report what a probe has found. Times are None where nothing could be measured."""

    problem: Annotated[str, Meta(max_length=1024)] = ""  # why the peer cannot be reached
    round_trip_s: float | None = None
    clock_offset_s: float | None = None  # of the peer's clock; positive: it is ahead
    transfer_problem: Annotated[str, Meta(max_length=1024)] = ""
    num_bytes: int = 0  # read from the peer's memory
    duration_s: float = 0.0
    tcp_bytes: int = 0  # that came over TCP meanwhile from the peer's host
    rdma_devices: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=64)] = ()  # of the asked
    ucx: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=64)] = ()  # its UCX_* settings


class ProbeOfferRequest(Message, frozen=True):
    """Ask a worker for memory to read from: worker method `probe_offer`. The memory is kept as long as the call."""

    transfer: Annotated[str, Meta(max_length=16)]
    num_bytes: Annotated[int, Meta(ge=1 << 20, le=MOST_PROBE_BYTES)]


class ProbeOffer(Message, frozen=True):
    ticket: Ticket


class KvDigest(Message, frozen=True):
    """A hash of a worker's cache after batch `seq` of its KV events: the answer of worker method `kv_digest`."""

    seq: int  # -1: before the first
    blocks: int
    value: int  # u64, see kvmesh.protocol.hashing.digest_term


_LoadCount = Annotated[int, Meta(ge=0, le=1 << 40)]


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """Worker method `load`: the load of one rank that routers cannot know from their bookings.

    The call stays open and sends a report when it has changed. A report that says something is repeated.
    """

    dp_rank: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    outside_requests: _LoadCount = 0  # of callers that use the engine without the mesh
    outside_blocks: _LoadCount = 0  # KV blocks that these requests hold
    queued_tokens: _LoadCount = 0  # prompt tokens that are certainly still to compute, whoever sent them
    valid_s: Annotated[float, Meta(gt=0, le=3600)] = 3.0  # to be forgotten if no other report comes for so long

    @property
    def says_something(self) -> bool:
        return bool(self.outside_requests or self.outside_blocks or self.queued_tokens)


T = TypeVar("T")
SomeCard = TypeVar("SomeCard", bound=Card)
_encoder = msgspec.msgpack.Encoder()
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The exceptions that msgspec raises for bytes that are no value of the expected type."""


def encode(message: object) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """Read one message. Raises WireError."""
    try:
        return decoder(kind).decode(data)
    except UNREADABLE as error:
        raise unreadable(kind, error) from error


def encode_card(card: Card) -> bytes:
    """Return the card for discovery, with the versions that this process understands."""
    versions = {"protocol": PROTOCOL_VERSION, "oldest_protocol": OLDEST_PROTOCOL, "release": RELEASE}
    return encode(msgspec.structs.replace(card, **versions))


def decode_card(data: bytes, kind: type[SomeCard]) -> SomeCard:
    """Read a card of discovery. Raises WireError; it is a VersionError if the two processes cannot work together.

    The versions are read first: of the rest, another version may have anything.
    """
    common_version(decode(data, Card).versions)
    return decode(data, kind)


_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}  # one for each kind of message


def decoder(kind: type[T]) -> "msgspec.msgpack.Decoder[T]":
    """Return the decoder of one kind of message, for callers with many. `unreadable` explains its exceptions."""
    if (known := _decoders.get(kind)) is None:
        known = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return known


def unreadable(kind: type, error: Exception) -> WireError:
    return WireError(f"unreadable {kind.__name__}: {error}", hint=NEIGHBOURS)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return token_bytes(tokens)


def unpack_tokens(data: bytes) -> list[int]:
    """Raises WireError if `data` is not whole u32s."""
    return token_array(data).tolist()


def token_array(data: bytes) -> "array[int]":
    """Unpack into an array of u32, which takes a fraction of the memory of a list. Raises WireError."""
    if len(data) % 4:
        raise WireError(f"a prompt of {len(data)} bytes is not a list of u32 tokens", hint="see pack_tokens")
    tokens = array("I")
    tokens.frombytes(data)
    return tokens
