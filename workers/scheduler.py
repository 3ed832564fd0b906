"""Plan which sequences run in the next step, and apply the step's result to them. Pure: no clock, no tensors.

The torch and the mock engine share it. A step computes at most `max_step_tokens` new tokens: one for each sequence that
decodes, the rest for prompts, in chunks where they do not fit. Sequences are admitted in the order in which they came.
When blocks run out, the youngest sequence is preempted and later computes again what is not cached.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite
from typing import NamedTuple, Protocol

import numpy as np

from kvmesh.kvcache.pool import BlockPool, PoolExhaustedError
from kvmesh.kvcache.tiers.peers import PeerPrefixes
from kvmesh.kvcache.tiers.stack import PlannedLoad, Prefix, TierStack
from kvmesh.protocol.errors import ContextLengthError, EngineError, InvalidRequestError, MeshError
from kvmesh.protocol.hashing import hash_seed, sequence_hash_bytes, token_bytes, unpack_hashes
from kvmesh.protocol.ids import RequestId, SequenceHash
from kvmesh.protocol.messages import (
    MAX_PROMPT_LOGPROBS,
    Delta,
    EmbedRequest,
    FinishReason,
    GenerateRequest,
    PrefixSource,
    SamplingParams,
    TokenLogprob,
    token_array,
)
from kvmesh.workers.checks import check_prompt
from kvmesh.workers.executor import Embedded, Result, Row, Sampled, Scored
from kvmesh.workers.guides import Matcher

MAX_TOKEN_RULES = 8192  # tokens that a request may bias, or list as the only ones: each costs time in every step


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int
    max_step_tokens: int
    context_tokens: int
    vocab_size: int
    max_waiting: int = 4096


class Tokens(Protocol):
    """A list of token ids, or what stands for one where the ids matter to nobody."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Sequence[int]: ...
    def append(self, token_id: int, /) -> None: ...
    def extend(self, token_ids: Sequence[int], /) -> None: ...


@dataclass(slots=True, eq=False)
class SequenceState:
    """The state of one request. Positions < num_computed have their KV in `table`."""

    request: GenerateRequest
    prompt: Sequence[int]
    output: list[int]
    tokens: Tokens  # prompt + output
    stop_ids: frozenset[int]
    seed: int  # of the block hashes
    table: list[int] = field(default_factory=list)
    hashes: list[SequenceHash] = field(default_factory=list)  # of full blocks, as far as they were needed
    num_computed: int = 0
    num_committed: int = 0  # blocks of `table` that the pool knows by name
    cached_tokens: int | None = None  # found in the prefix cache when it was first admitted
    told_cached: bool = False  # the first delta carries it
    pulling: bool = False
    pulled: bool = False  # a pull was tried: not again after a preemption
    unloadable: bool = False  # a load from a tier was late or failed: its prompt is computed
    aborted: bool = False
    guide: Matcher | None = None
    pending: Sampled | None = None  # its latest token, until the guide has followed it
    embed: bool = False  # its prompt is wanted as a vector, and no token
    num_preempted: int = 0
    unscored_from: int | None = None  # the first token of the prompt whose logprob is to come; None: none is

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is still to compute before the next one can be sampled; >= 1."""
        return len(self.tokens) - self.num_computed

    def extend_hashes(self, count: int, block_size: int) -> None:
        """Know the names of the first `count` blocks, or more."""
        known = len(self.hashes)
        if count > known:
            tokens = token_bytes(self.tokens[known * block_size : count * block_size])
            parent = self.hashes[-1] if known else None
            self.hashes += unpack_hashes(sequence_hash_bytes(tokens, block_size, self.seed, parent))  # type: ignore[arg-type]

    def block_tokens(self, number: int, block_size: int) -> Sequence[int]:
        """Return the tokens of a full block."""
        return self.tokens[number * block_size : (number + 1) * block_size]


@dataclass(frozen=True, slots=True)
class KvPull:
    """Blocks to fetch from the peer of the sequence's ticket: those from number `skip` on, into `into`."""

    sequence: SequenceState
    skip: int
    into: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TierLoad(KvPull):
    """Blocks that come back from tiers below the device, instead of being computed."""

    planned: PlannedLoad


@dataclass(frozen=True, slots=True, eq=False)
class PeerLoad(KvPull):
    """Blocks of a prompt that a peer has, and that are pulled from there instead of being computed."""

    source: PrefixSource
    prefix: Prefix


@dataclass(slots=True)
class Step:
    rows: list[Row] = field(default_factory=list)
    sequences: list[SequenceState] = field(default_factory=list)  # of the rows
    pulls: list[KvPull] = field(default_factory=list)  # from prefill workers and from peers
    loads: list[TierLoad] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Steps in which each of `sequences` gets one token; besides, blocks are only filled and taken.

    The run is valid until the scheduler gets any other call.
    """

    sequences: tuple[SequenceState, ...]
    steps: int  # at most; >= 1
    held_blocks: int  # entries of their block tables, before the first step
    growth: tuple[int, ...]  # steps, counted from 0, that take one more block each before they begin; in order

    def blocks_at(self, step: int) -> int:
        """Entries of the block tables while that step is computed."""
        return self.held_blocks + bisect_right(self.growth, step)


class Output(NamedTuple):
    """A step's addition to one request. `handoff`: blocks kept for a decode worker, holding `num_tokens`."""

    request_id: RequestId
    delta: Delta = Delta()
    handoff: tuple[int, ...] = ()
    num_tokens: int = 0
    vector: bytes = b""  # of an embedding: all there is
    failure: MeshError | None = None  # it has ended with this


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        eos_token_ids: Sequence[int],
        tiers: TierStack | None = None,
        peers: PeerPrefixes | None = None,
    ) -> None:
        self.pool = pool
        self.tiers = tiers
        self.peers = peers  # None: nothing is pulled from them
        self._joined = _JoinedLoads()
        self._limits = limits
        self._eos = frozenset(eos_token_ids)
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []  # oldest first; those that pull included
        self._known: dict[RequestId, SequenceState] = {}
        self._in_step: Sequence[SequenceState] = []  # whose tokens are being computed, aborted ones included
        self.num_preempted = 0  # how often blocks were taken from a sequence for an older one

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._joined)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are still to compute. What a waiting request will find cached is not known, and counts.

        Prompts that will be pulled do not count.
        """
        running = sum(s.num_missing for s in self._running if s.num_missing > 1 and not s.pulling)
        waiting = sum(s.num_missing for s in self._waiting if s.request.ticket is None or s.pulled)
        return running + waiting + sum(s.num_missing for s in self._joined)

    @property
    def certain_tokens(self) -> int:
        """Return the tokens of admitted prompts that remain after the next step. What is cached of them is known."""
        missing = sum([s.num_missing for s in self._running if s.num_missing > 1 and not s.pulling])
        return max(0, missing - self._limits.max_step_tokens)

    def add(self, request: GenerateRequest, guide: Matcher | None = None) -> None:
        """Queue a request. Raises InvalidRequestError if it can never run here.

        `guide`: stands where the tokens generated so far have led it.
        """
        prompt = token_array(request.prompt)
        output = list(request.generated)
        self.check_size(len(prompt), len(output), request.stop.max_tokens)
        self._check_tokens(prompt, output)
        self._check_rules(request.sampling)
        wants_scores = request.sampling.prompt_logprobs is not None and len(prompt) > 1
        if wants_scores:
            check_prompt_logprobs(request.sampling, len(prompt))
        stop_ids = frozenset(request.stop.stop_token_ids)
        if guide is not None or not request.stop.ignore_eos:  # a guide allows the end only where it is one
            stop_ids |= self._eos
        self.queue(
            SequenceState(
                request=request,
                prompt=prompt,
                output=output,
                tokens=prompt + array("I", output),
                stop_ids=stop_ids,
                seed=hash_seed(request.lora, request.cache_salt),
                guide=guide,
                unscored_from=1 if wants_scores else None,
            )
        )

    def add_embedding(self, request: EmbedRequest) -> None:
        """Queue a prompt whose vector is wanted. Raises InvalidRequestError if it can never run here."""
        prompt = token_array(request.prompt)
        if not 0 < len(prompt) <= self._limits.context_tokens:
            raise ContextLengthError(
                f"the text has {len(prompt)} tokens, between 1 and {self._limits.context_tokens} are possible"
            )
        self._check_blocks(len(prompt), "shorten the text")
        self._check_tokens(prompt, ())
        stands_for = GenerateRequest(
            request_id=request.request_id,
            model=request.model,
            prompt=request.prompt,
            lora=request.lora,
            cache_salt=request.cache_salt,
        )
        self.queue(
            SequenceState(
                request=stands_for,
                prompt=prompt,
                output=[],
                tokens=prompt[:],
                stop_ids=frozenset(),
                seed=hash_seed(request.lora, request.cache_salt),
                embed=True,
            )
        )

    def queue(self, sequence: SequenceState) -> None:
        """Queue a checked sequence. Raises InvalidRequestError if its request runs here already."""
        if sequence.request_id in self._known:
            raise InvalidRequestError(f"request {sequence.request_id} runs here already")
        self._known[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def check_size(self, isl_tokens: int, num_generated: int, max_tokens: int) -> None:
        """Raise InvalidRequestError for a request that can never run here, whatever its tokens are."""
        check_prompt(isl_tokens, num_generated, self._limits.context_tokens)
        if max_tokens <= num_generated:
            raise InvalidRequestError(f"{num_generated} of at most {max_tokens} tokens are generated already")
        self._check_blocks(min(isl_tokens + max_tokens, self._limits.context_tokens), "lower max_tokens")

    def _check_blocks(self, most_tokens: int, remedy: str) -> None:
        if self._blocks_for(most_tokens) > self.pool.num_blocks:
            raise ContextLengthError(
                f"prompt and answer of up to {most_tokens} tokens need {self._blocks_for(most_tokens)} KV blocks, "
                f"this worker has {self.pool.num_blocks}",
                hint=f"{remedy}, or start the worker with more --num-blocks",
            )

    def _check_tokens(self, prompt: "array[int]", output: Sequence[int]) -> None:
        vocab_size = self._limits.vocab_size
        if np.asarray(prompt).max() >= vocab_size or not all(0 <= t < vocab_size for t in output):
            raise InvalidRequestError(f"a token id is beyond the model's vocabulary of {vocab_size}", param="prompt")

    def _check_rules(self, sampling: SamplingParams) -> None:
        """Raise InvalidRequestError for a rule about a token that the model does not have."""
        ruled = {
            "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
            "allowed_token_ids": sampling.allowed_token_ids,
        }
        for param, token_ids in ruled.items():
            if len(token_ids) > MAX_TOKEN_RULES:
                raise InvalidRequestError(
                    f"{param} names {len(token_ids)} tokens, at most {MAX_TOKEN_RULES} are taken", param=param
                )
            for token_id in token_ids:
                if not 0 <= token_id < self._limits.vocab_size:
                    raise InvalidRequestError(
                        f"{param} names token {token_id}, the model's vocabulary has {self._limits.vocab_size}",
                        param=param,
                    )
        if not all(isfinite(bias) for _, bias in sampling.logit_bias):
            raise InvalidRequestError("a logit bias is not a finite number", param="logit_bias")

    def is_full(self) -> bool:
        return self.num_waiting >= self._limits.max_waiting

    def abort(self, request_id: RequestId) -> None:
        """Give a request up and free what it holds. Of one that pulls, `pull_given_up` does so."""
        sequence = self._known.pop(request_id, None)
        if sequence is None:
            return
        sequence.aborted = True
        if sequence.pulling:
            return
        if sequence in self._running:
            self._running.remove(sequence)
        elif not self._joined.leave(sequence):
            self._waiting.remove(sequence)
        self._free(sequence)

    def plan(self) -> Step:
        """Choose the next step. Pulls run beside it; a step without rows need not be executed."""
        step = Step()
        budget = self._limits.max_step_tokens
        for sequence in sorted(self._running, key=lambda s: s.num_missing > 1):  # decoding sequences go first
            if sequence.pulling or sequence.pending or not sequence.table or budget == 0:  # no blocks: just preempted
                continue
            count = min(sequence.num_missing, budget)
            if self._reserve(sequence, count, step):
                self._add_row(step, sequence, count)
                budget -= count
        while budget > 0 and (admitted := self._admit_next()) is not None:
            if not self._moves(admitted, step):
                count = min(admitted.num_missing, budget)
                self._add_row(step, admitted, count)
                budget -= count
        self._in_step = step.sequences
        return step

    def plan_moves(self) -> Step:
        """Choose the pulls and loads that can begin now, although a step is being computed: it has no rows.

        Those who wait are admitted in turn, up to the first one whose KV comes from nowhere. Nobody is, if a request of
        the step was aborted: the step still writes to blocks that are free by now.
        """
        step = Step()
        if any(sequence.aborted for sequence in self._in_step):
            return step
        while self._waiting and self._may_move(self._waiting[0]) and (sequence := self._admit_next()) is not None:
            self._moves(sequence, step)
        return step

    def complete(self, step: Step, results: Sequence[Result]) -> list[Output]:
        """Take the step's results in. Requests aborted meanwhile are skipped."""
        self._in_step = []
        outputs: list[Output] = []
        for row, sequence, result in zip(step.rows, step.sequences, results, strict=True):
            if sequence.aborted:
                continue
            sequence.num_computed = row.start + len(row.token_ids)
            self._commit_full_blocks(sequence)
            if isinstance(result, Sampled):
                outputs += self._append_or_hold(sequence, result)
            elif isinstance(result, Embedded):
                self._end(sequence)
                self._free(sequence)
                outputs.append(Output(sequence.request_id, vector=result.vector))
            elif isinstance(result, Scored):
                outputs += self._score(sequence, result)
        return outputs

    def plan_run(self) -> DecodeRun | None:
        """Steps that `plan` and `complete` would go through with nothing but tokens to tell, or None.

        Nobody is admitted, ends, is preempted or has a prompt to compute in them, and no stop token can come.
        """
        sequences = [sequence for sequence in self._running if not sequence.pulling]
        if not 0 < len(sequences) <= self._limits.max_step_tokens or not all(map(self._is_steady, sequences)):
            return None
        steps = min(map(self._tokens_left, sequences)) - 1  # the last one ends somebody
        if steps > 0 and self._could_admit(len(sequences)):
            head = self._waiting[0]
            if self._fits(head):
                return None
            steps = min(steps, *map(self._steps_to_commit, sequences))  # which may be what it waits for
        if steps > 0 and (growth := self._growth(sequences, steps)) is not None:
            return growth
        return None

    def complete_run(
        self, run: DecodeRun, steps: int, draw: Callable[[SequenceState, int], tuple[int, ...]]
    ) -> list[Output]:
        """Complete `steps` steps of the run as if each had been planned, with one delta for all of them.

        `steps`: from 1 to `run.steps`. `draw(sequence, n)`: its next n tokens.
        """
        size = self.pool.block_size
        happenings: list[tuple[int, int, int, SequenceState]] = []  # (when, order, computed then, sequence)
        outputs: list[Output] = []
        for order, sequence in enumerate(run.sequences):
            start = sequence.num_computed
            grows = range(len(sequence.table) * size - start, steps, size)  # before those steps, counted from 0
            fills = range(size - start % size, steps + 1, size)  # after so many steps
            happenings += [(2 * step, order, 0, sequence) for step in grows]
            happenings += [(2 * step - 1, order, start + step, sequence) for step in fills]
            drawn = draw(sequence, steps)
            sequence.output.extend(drawn)
            sequence.tokens.extend(drawn)
            cached = None if sequence.told_cached else sequence.cached_tokens
            sequence.told_cached = True
            outputs.append(Output(sequence.request_id, Delta(token_ids=drawn, cached_tokens=cached)))
        happenings.sort()
        computed_at_end = [sequence.num_computed + steps for sequence in run.sequences]
        for _, _, num_computed, sequence in happenings:
            if num_computed:
                sequence.num_computed = num_computed
                self._commit_full_blocks(sequence)
            else:
                sequence.table += self.pool.allocate(1)
        for sequence, num_computed in zip(run.sequences, computed_at_end, strict=True):
            sequence.num_computed = num_computed
        return outputs

    def _is_steady(self, sequence: SequenceState) -> bool:
        """Return whether the sequence decodes and continues until it has all its tokens."""
        request = sequence.request
        return (
            sequence.num_missing == 1
            and bool(sequence.table)
            and sequence.told_cached  # its first token has a delta of its own
            and sequence.num_computed // self.pool.block_size == sequence.num_committed
            and not (sequence.stop_ids or sequence.embed or request.offer_kv)
            and sequence.guide is None
            and request.sampling.top_logprobs is None
        )

    def _tokens_left(self, sequence: SequenceState) -> int:
        return min(
            sequence.request.stop.max_tokens - len(sequence.output), self._limits.context_tokens - len(sequence.tokens)
        )

    def _could_admit(self, num_decoding: int) -> bool:
        """There is somebody to admit, a seat, and budget."""
        has_room = len(self._running) < self._limits.max_num_seqs and num_decoding < self._limits.max_step_tokens
        return bool(self._waiting) and has_room

    def _steps_to_commit(self, sequence: SequenceState) -> int:
        """Return the number of steps until the sequence's next block is full."""
        return self.pool.block_size - sequence.num_computed % self.pool.block_size

    def _growth(self, sequences: Sequence[SequenceState], most_steps: int) -> DecodeRun | None:
        """Return the run of these sequences, as long as the free blocks allow. None if that is less than one step."""
        size = self.pool.block_size
        growth: list[int] = []
        for sequence in sequences:
            growth.extend(range(len(sequence.table) * size - sequence.num_computed, most_steps, size))
        growth.sort()
        room = self.pool.available_blocks
        steps = growth[room] if len(growth) > room else most_steps  # before that step somebody is preempted
        if steps == 0:
            return None
        held_blocks = sum([len(sequence.table) for sequence in sequences])
        return DecodeRun(tuple(sequences), steps, held_blocks, tuple(growth[: bisect_left(growth, steps)]))

    def pull_ended(self, sequence: SequenceState, *, arrived: bool) -> None:
        """The blocks of a pull hold the KV of all tokens but the last, or (not `arrived`) must be computed."""
        sequence.pulling = False
        if arrived:
            sequence.num_computed = len(sequence.tokens) - 1
            self._commit_full_blocks(sequence)

    def pull_given_up(self, pull: KvPull) -> None:
        """Do not wait for a pull: it may never end. A request that still runs is computed in other blocks.

        The pull's own blocks stay held, since it may still write into them, until `pull_let_go`.
        """
        sequence = pull.sequence
        sequence.pulling = False
        sequence.table = sequence.table[: pull.skip] + sequence.table[pull.skip + len(pull.into) :]
        self._running.remove(sequence)
        self._free(sequence)
        if not sequence.aborted:
            self._waiting.appendleft(sequence)

    def pull_let_go(self, pull: KvPull) -> None:
        """A pull that was given up has ended: its blocks can be used again."""
        self.pool.release(pull.into)

    def load_ended(self, load: "TierLoad | PeerLoad", arrived: int) -> None:
        """Take that the first `arrived` blocks of a load hold their KV; the rest of the prompt is computed.

        Requests that wait for the same blocks are admitted next.
        """
        sequence = load.sequence
        sequence.pulling = False
        if arrived:
            sequence.num_computed = (load.skip + arrived) * self.pool.block_size
            self._commit_full_blocks(sequence)
            sequence.cached_tokens = min(sequence.num_computed, len(sequence.prompt))
        self._end_joined(load, is_bad=arrived < len(load.into))

    def load_given_up(self, load: "TierLoad | PeerLoad") -> None:
        """Do not wait for a load: `pull_given_up` says what becomes of its request, and `pull_let_go` of its blocks."""
        is_bad = not load.sequence.aborted
        load.sequence.unloadable = is_bad
        self.pull_given_up(load)
        self._end_joined(load, is_bad=is_bad)

    def _end_joined(self, load: "TierLoad | PeerLoad", *, is_bad: bool) -> None:
        joined = self._joined.end(load)
        for sequence in joined:
            sequence.unloadable |= is_bad
        self._waiting.extendleft(reversed(joined))

    def _joins(self, sequence: SequenceState) -> bool:
        """Let a sequence wait aside if its next block is being loaded for another one. Return whether it does."""
        if sequence.unloadable or (sequence.request.ticket is not None and not sequence.pulled):
            return False
        names = self._matchable(sequence)
        depth = self.pool.peek(names)
        return depth < len(names) and self._joined.join(names[depth], sequence)

    def _admit_next(self) -> SequenceState | None:
        """Admit the next one who waits, if there are a seat and blocks for it. Those who join a load wait aside."""
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            sequence = self._waiting[0]
            if self._joined and self._joins(sequence):
                self._waiting.popleft()
                continue
            if not self._admit(sequence):
                return None
            self._waiting.popleft()
            self._running.append(sequence)
            return sequence
        return None

    def _moves(self, sequence: SequenceState, step: Step) -> bool:
        """Begin the pull or the load of a sequence that was just admitted. False: its prompt is computed."""
        if self._wants_pull(sequence):
            sequence.pulling = sequence.pulled = True
            skip, end = sequence.num_committed, self._blocks_for(len(sequence.tokens) - 1)
            step.pulls.append(KvPull(sequence, skip, tuple(sequence.table[skip:end])))
        elif isinstance(load := self._load_for(sequence), TierLoad):
            step.loads.append(load)
        elif load is not None:
            step.pulls.append(load)
        return sequence.pulling

    def _may_move(self, sequence: SequenceState) -> bool:
        """Return whether KV of a waiting sequence may come from elsewhere, and it need not wait for the step's end.

        Whoever is admitted before it finds nothing of what the step is computing.
        """
        if sequence.request.ticket is not None and not sequence.pulled:
            return True
        if sequence.unloadable or len(self._running) >= self._limits.max_num_seqs:
            return False
        names = self._matchable(sequence)
        first = self.pool.peek(names)
        end = max(self._tiers_end(names, first), self._peer_end(sequence, len(names)), first)
        if end == first or end == len(names):
            return end > first
        prompts = [s.hashes for s in self._running if s.num_missing > 1 and not s.pulling]
        return not any(len(hashes) > end and hashes[end] == names[end] for hashes in prompts)

    def _tiers_end(self, names: Sequence[SequenceHash], first: int) -> int:
        """Return up to which block the blocks from number `first` on lie in tiers of this worker, by their names."""
        while self.tiers is not None and first < len(names) and self.tiers.has(names[first]):
            first += 1
        return first

    def _peer_end(self, sequence: SequenceState, num_blocks: int) -> int:
        """Return up to which block a peer has the prompt, as far as the router knows; 0: none is asked."""
        source = sequence.request.source
        if source is None or self.peers is None or sequence.pulled:
            return 0
        return min(source.blocks, num_blocks)

    def _load_for(self, sequence: SequenceState) -> "TierLoad | PeerLoad | None":
        """Return the load that an admitted sequence begins with, if one is faster than computing its prompt."""
        source = sequence.request.source
        if self.tiers is None and (self.peers is None or source is None):
            return None
        first, size = sequence.num_committed, self.pool.block_size
        prefix = Prefix(
            self._matchable(sequence),
            lambda number: sequence.block_tokens(number, size),
            sequence.request.lora,
            sequence.request.cache_salt,
        )
        load = None
        if not sequence.unloadable:
            load = self._peer_load(sequence, prefix, first) or self._tier_load(sequence, prefix, first)
        count = 0 if load is None else len(load.into)
        if self.tiers is not None and not sequence.num_preempted:
            self.tiers.asked_for(prefix, first, count)
        if load is not None:
            sequence.pulling = True
            self._joined.begin(load, prefix.names[first : first + count])
        return load

    def _tier_load(self, sequence: SequenceState, prefix: Prefix, first: int) -> TierLoad | None:
        if self.tiers is None:
            return None
        planned = self.tiers.plan_load(prefix, first, self._backlog_tokens(sequence))
        if planned is None:
            return None
        return TierLoad(sequence, first, tuple(sequence.table[first : first + len(planned.pieces)]), planned)

    def _peer_load(self, sequence: SequenceState, prefix: Prefix, first: int) -> PeerLoad | None:
        """Return what is pulled from the peer that the router has named, unless tiers of this worker have as much."""
        source, peers, end = sequence.request.source, self.peers, self._peer_end(sequence, len(prefix.names))
        if source is None or peers is None or self._tiers_end(prefix.names, first) >= end:
            return None
        count = peers.plan(end, first, self._backlog_tokens(sequence))
        if not count:
            return None
        sequence.pulled = True
        return PeerLoad(sequence, first, tuple(sequence.table[first : first + count]), source, prefix)

    def _backlog_tokens(self, sequence: SequenceState) -> int:
        """Return how many prompt tokens are computed before those of an admitted sequence."""
        backlog = sum([s.num_missing for s in self._running if s.num_missing > 1 and not s.pulling])
        return max(0, backlog - sequence.num_missing)

    def _wants_pull(self, sequence: SequenceState) -> bool:
        ticket = sequence.request.ticket
        return (
            ticket is not None
            and not sequence.pulled
            and sequence.unscored_from is None
            and ticket.num_tokens == len(sequence.tokens) - 1
            and len(ticket.block_ids) == self._blocks_for(ticket.num_tokens)
            and sequence.num_committed < len(ticket.block_ids)
        )

    def _admit(self, sequence: SequenceState) -> bool:
        """Give a waiting sequence the cached prefix and blocks for the rest; False if they are not there.

        The last token is always computed, its logits are needed: a prompt that is cached whole is matched up
        to the block before.
        """
        if not self._fits(sequence):
            return False
        block_size = self.pool.block_size
        matched = self.pool.match(self._matchable(sequence))
        fresh = self.pool.allocate(self._blocks_for(len(sequence.tokens)) - len(matched))
        sequence.table = matched + fresh
        sequence.num_computed = len(matched) * block_size
        sequence.num_committed = len(matched)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, len(sequence.prompt))
        return True

    def _matchable(self, sequence: SequenceState) -> Sequence[SequenceHash]:
        """Return the blocks that need not be computed if they are cached. A token's logprob is known at the position
        before it, so that position has to be computed."""
        end = len(sequence.tokens) if sequence.unscored_from is None else sequence.unscored_from
        count = (end - 1) // self.pool.block_size
        sequence.extend_hashes(count, self.pool.block_size)
        return sequence.hashes[:count]

    def _fits(self, sequence: SequenceState) -> bool:
        """Return whether a waiting sequence could be admitted. Nothing changes, not even what is evicted first."""
        return self.pool.has_room(self._matchable(sequence), self._blocks_for(len(sequence.tokens)))

    def _reserve(self, sequence: SequenceState, count: int, step: Step) -> bool:
        """Make room for `count` more tokens, at the cost of the youngest if need be."""
        lacking = self._blocks_for(sequence.num_computed + count) - len(sequence.table)
        while lacking > 0:
            try:
                sequence.table += self.pool.allocate(lacking)
                return True
            except PoolExhaustedError:
                victim = self._youngest(step)
                if victim is None:
                    return False
                self._preempt(victim)
                if victim is sequence:
                    return False
        return True

    def _youngest(self, step: Step) -> SequenceState | None:
        for sequence in reversed(self._running):
            if not sequence.pulling and not sequence.pending and sequence not in step.sequences:
                return sequence
        return None

    def _preempt(self, sequence: SequenceState) -> None:
        self._running.remove(sequence)
        self._free(sequence)
        self._waiting.appendleft(sequence)
        self.num_preempted += 1
        sequence.num_preempted += 1

    def _add_row(self, step: Step, sequence: SequenceState, count: int) -> None:
        start, tokens, request = sequence.num_computed, sequence.tokens, sequence.request
        end = start + count
        sample = end == len(tokens)
        is_too_short = sample and len(sequence.output) < request.stop.min_tokens
        step.sequences.append(sequence)
        step.rows.append(
            Row(
                request_id=request.request_id,
                token_ids=tokens[start:end],
                start=start,
                block_table=sequence.table,
                sample=sample,
                sampling=request.sampling,
                prompt=sequence.prompt,
                output=sequence.output,
                banned=tuple(sequence.stop_ids) if is_too_short else (),
                guide=sequence.guide,
                embed=sequence.embed,
                lora=request.lora,
                scored_from=sequence.unscored_from,
            )
        )

    def _score(self, sequence: SequenceState, result: Scored) -> list[Output]:
        """Take in the logprobs of the prompt's next tokens, and the first token of the answer if it has come."""
        assert sequence.unscored_from is not None
        outputs = [Output(sequence.request_id, Delta(logprobs=result.logprobs))] if result.logprobs else []
        sequence.unscored_from += len(result.logprobs)
        if sequence.unscored_from == len(sequence.prompt):
            sequence.unscored_from = None
        if result.sampled is not None:
            outputs += self._append_or_hold(sequence, result.sampled)
        return outputs

    def complete_pending(self) -> list[Output]:
        """Append the tokens whose guides have followed them meanwhile."""
        outputs: list[Output] = []
        for sequence in [s for s in self._running if s.pending is not None]:
            result, sequence.pending = sequence.pending, None
            assert result is not None
            outputs += self._append_or_hold(sequence, result)
        return outputs

    def _append_or_hold(self, sequence: SequenceState, result: Sampled) -> list[Output]:
        """Append a token; hold it while its guide still works on it, because the answer may end with it."""
        guide = sequence.guide
        if guide is not None and guide.is_waiting:
            sequence.pending = result
            return []
        if guide is not None and guide.failure:
            self._end(sequence)
            self._free(sequence)
            return [Output(sequence.request_id, failure=_guide_failure(guide))]
        return [self._append(sequence, result)]

    def _append(self, sequence: SequenceState, result: Sampled) -> Output:
        token = result.token_id
        sequence.output.append(token)
        sequence.tokens.append(token)
        reason = self._finish_reason(sequence, token)
        logprobs: tuple[TokenLogprob, ...] | None = None if result.logprob is None else (result.logprob,)
        cached = None if sequence.told_cached else sequence.cached_tokens
        sequence.told_cached = True
        is_stop_token = reason is FinishReason.STOP and token in sequence.stop_ids
        delta = Delta(
            token_ids=(token,),
            finish_reason=reason,
            logprobs=logprobs,
            cached_tokens=cached,
            stop_token=token if is_stop_token else None,
        )
        if reason is None and not sequence.request.offer_kv:
            return Output(sequence.request_id, delta)
        self._end(sequence)
        if reason is None:  # a prefill leg: the offer takes the blocks, with their references
            return Output(sequence.request_id, delta, tuple(sequence.table), sequence.num_computed)
        self._free(sequence)
        return Output(sequence.request_id, delta)

    def _end(self, sequence: SequenceState) -> None:
        self._running.remove(sequence)
        del self._known[sequence.request_id]

    def _finish_reason(self, sequence: SequenceState, token: int) -> FinishReason | None:
        if sequence.guide is not None and sequence.guide.is_complete:
            return FinishReason.STOP  # no token may follow, whatever min_tokens and ignore_eos say
        if token in sequence.stop_ids and len(sequence.output) > sequence.request.stop.min_tokens:
            return FinishReason.STOP
        if len(sequence.output) >= sequence.request.stop.max_tokens:
            return FinishReason.LENGTH
        if len(sequence.tokens) >= self._limits.context_tokens:
            return FinishReason.LENGTH
        return None

    def _commit_full_blocks(self, sequence: SequenceState) -> None:
        block_size = self.pool.block_size
        num_full = sequence.num_computed // block_size
        if num_full <= sequence.num_committed:
            return
        sequence.extend_hashes(num_full, block_size)
        for i in range(sequence.num_committed, num_full):
            sequence.table[i] = self.pool.commit(
                sequence.table[i],
                sequence.hashes[i],
                sequence.table[i - 1] if i else None,
                sequence.block_tokens(i, block_size),
                lora=sequence.request.lora,
                salt=sequence.request.cache_salt,
            )
        sequence.num_committed = num_full

    def _free(self, sequence: SequenceState) -> None:
        self.pool.release(sequence.table)
        sequence.table = []
        sequence.num_computed = sequence.num_committed = 0

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)


class _JoinedLoads:
    """The loads that run, and the sequences that wait aside for each: they hold no blocks and no seat."""

    def __init__(self) -> None:
        self._loads: dict[SequenceHash, TierLoad | PeerLoad] = {}  # by the blocks that each brings
        self._waiting: dict[TierLoad | PeerLoad, list[SequenceState]] = {}

    def __bool__(self) -> bool:
        """Return whether there is a load that could be joined."""
        return bool(self._waiting)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[SequenceState]:
        return chain.from_iterable(self._waiting.values())

    def begin(self, load: TierLoad | PeerLoad, names: Sequence[SequenceHash]) -> None:
        self._waiting[load] = []
        self._loads.update(dict.fromkeys(names, load))

    def join(self, name: SequenceHash, sequence: SequenceState) -> bool:
        """Wait for the load that brings this block. False: there is none."""
        load = self._loads.get(name)
        if load is None:
            return False
        self._waiting[load].append(sequence)
        return True

    def leave(self, sequence: SequenceState) -> bool:
        """Do not wait any more. False: the sequence did not."""
        for waiting in self._waiting.values():
            if sequence in waiting:
                waiting.remove(sequence)
                return True
        return False

    def end(self, load: TierLoad | PeerLoad) -> list[SequenceState]:
        """Return the sequences that have waited for a load, in the order in which they came."""
        for name in [name for name, other in self._loads.items() if other is load]:
            del self._loads[name]
        return self._waiting.pop(load)


def check_prompt_logprobs(sampling: SamplingParams, num_prompt: int) -> None:
    """Raise InvalidRequestError if the logprobs of the prompt are too many for one answer."""
    count = num_prompt * (1 + (sampling.prompt_logprobs or 0))
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"the logprobs of {num_prompt} prompt tokens and the likeliest {sampling.prompt_logprobs} for each are "
            f"{count}, at most {MAX_PROMPT_LOGPROBS} are told",
            hint="shorten the prompt or lower logprobs",
            param="logprobs",
        )


def _guide_failure(guide: Matcher) -> MeshError:
    """Return why an answer ends. One whose guide lost its process may continue on another worker."""
    if guide.is_lost:
        return EngineError(f"the answer has lost its guide: {guide.failure}")
    return InvalidRequestError(
        f"the answer cannot follow its guide any further: {guide.failure}", hint="make the guide simpler", param="guide"
    )
